//! NVIDIA GPUs: devices, streams, events, and host memory that they copy from and to by themselves.
//!
//! | item | what it is |
//! |---|---|
//! | [`probe`] | whether CUDA can be used here, without a panic where it cannot |
//! | [`Device`] | a GPU and its primary context, which other libraries share |
//! | [`Stream`], [`Event`] | an order of work, and a point in it that another stream can wait for |
//! | [`Moment`], [`waits`] | how long a device takes, and how often the host has waited for it |
//! | [`Pinned`] | page-locked bytes of the host |
//! | [`Mail`], [`Letter`] | a few bytes there and back without waiting |
//! | [`Module`], [`Function`] | kernels, loaded from PTX |
//! | [`Graph`] | work that was captured once and is launched again and again |
//! | [`Lent`] | a buffer as cudarc's, for libraries on cudarc |
//!
//! Memory and streams of other libraries are taken as they are, without a copy: [`Buffer::from_raw_on`](crate::Buffer::from_raw_on),
//! [`Buffer::from_cudarc`](crate::Buffer::from_cudarc), [`Stream::from_raw`], [`Stream::from_cudarc`].
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
mod graph;
mod interop;
mod mail;
mod memory;
mod module;
mod probe;
mod stream;
mod timing;

pub use device::Device;
pub use driver::waits;
pub use error::{Error, Found};
pub use graph::Graph;
pub use interop::Lent;
pub use mail::{Letter, Mail};
pub use memory::Pinned;
pub(crate) use memory::{Foreign, Memory};
pub use module::{Footprint, Function, Module};
pub use probe::{Driver, Unavailable, probe};
pub use stream::{Event, Stream};
pub use timing::Moment;
