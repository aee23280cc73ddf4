//! NVIDIA GPUs: devices, streams, events, and memory that the [`Meter`](crate::Meter) counts.
//!
//! | item | what it is |
//! |---|---|
//! | [`probe`] | whether CUDA can be used here, without a panic where it cannot |
//! | [`Device`] | a GPU and its primary context, which other libraries share |
//! | [`Stream`], [`Event`] | an order of work, and a point in it that another stream can wait for |
//! | [`Memory`], [`Pinned`] | bytes on the device, and bytes of the host that it copies from and to by itself |
//!
//! Work on a stream takes place some time after the call that asks for it; [`Memory`] and [`Pinned`] are not freed before.
//! What a drop could not do is told by the device's next call.
//!
//! ```
//! use meshstep_tensor::cuda::{self, Device, Memory, Pinned, Stream};
//! use meshstep_tensor::{Category, Meter};
//!
//! if let Err(missing) = cuda::probe() {
//!     println!("no GPU here: {missing}");
//!     return Ok(());
//! }
//! let (device, meter) = (Device::open(0)?, Meter::new());
//! let (copies, compute) = (Stream::new(&device)?, Stream::new(&device)?);
//! let host = Pinned::zeroed(&device, 8, &meter, Category::Staging)?;
//! host.write(0, &[1, 2, 3, 4])?;
//! let memory = Memory::zeroed(&copies, 8, &meter, Category::Params)?;
//! copies.copy_in(&host, 0, &memory, 0, 4)?;
//! compute.wait(&copies.record()?)?; // what follows on `compute` sees the copy
//! compute.copy_out(&memory, 0, &host, 4, 4)?;
//! compute.synchronize()?;
//! let mut bytes = [0; 8];
//! host.read(0, &mut bytes)?;
//! assert_eq!(bytes, [1, 2, 3, 4, 1, 2, 3, 4]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod device;
mod driver;
mod error;
mod memory;
mod probe;
mod stream;

pub use device::Device;
pub use error::Error;
pub use memory::{Memory, Pinned};
pub use probe::{Driver, Unavailable, probe};
pub use stream::{Event, Stream};
