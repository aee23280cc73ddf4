//! NVIDIA GPUs: devices, streams, events, and host memory that they copy from and to by themselves.
//!
//! | item | what it is |
//! |---|---|
//! | [`probe`] | whether CUDA can be used here, without a panic where it cannot |
//! | [`Device`] | a GPU and its primary context, which other libraries share |
//! | [`Stream`], [`Event`] | an order of work, and a point in it that another stream can wait for |
//! | [`Pinned`] | page-locked bytes of the host |
//! | [`Mail`], [`Letter`] | a few bytes there and back without waiting |
//! | [`Module`], [`Function`] | kernels, loaded from PTX |
//!
//! Device memory is a [`Buffer`](crate::Buffer) made by [`Buffer::zeroed_on`](crate::Buffer::zeroed_on) on a stream's
//! [`Queue`](crate::Queue). Work takes place some time after the call that asks for it, and memory is not freed before. What a
//! drop could not do is told by the device's next call.
//!
//! ```
//! use meshstep_tensor::cuda::{self, Device, Pinned, Stream};
//! use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
//!
//! if let Err(missing) = cuda::probe() {
//!     println!("no GPU here: {missing}");
//!     return Ok(());
//! }
//! let (device, meter) = (Device::open(0)?, Meter::new());
//! let (copies, compute) = (Stream::new(&device)?, Stream::new(&device)?);
//! let queue = Queue::cuda(copies.clone());
//! let host = Pinned::zeroed(&device, 8, &meter, Category::Staging)?;
//! host.write(0, bytemuck::bytes_of(&[1.5f32, 2.5]))?;
//! let mut params = Buffer::zeroed_on(&queue, 2, DType::F32, &meter, Category::Params)?;
//! copies.copy_in(&host, 0, params.as_mut())?; // goes on at once
//! compute.wait(&copies.record()?)?; // what follows on `compute` sees the copy
//! let mut values = [0f32; 2];
//! Queue::cuda(compute).download(params.as_slice(), (&mut values[..]).into())?;
//! assert_eq!(values, [1.5, 2.5]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod device;
mod driver;
mod error;
mod mail;
mod memory;
mod module;
mod probe;
mod stream;

pub use device::Device;
pub use error::Error;
pub use mail::{Letter, Mail};
pub(crate) use memory::Memory;
pub use memory::Pinned;
pub use module::{Function, Module};
pub use probe::{Driver, Unavailable, probe};
pub use stream::{Event, Stream};
