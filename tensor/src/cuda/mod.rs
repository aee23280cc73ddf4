//! NVIDIA GPUs: devices, streams, events, and host memory for asynchronous copies.
//!
//! | item | meaning |
//! |---|---|
//! | [`probe`] | check for a usable CUDA driver, without a panic if there is none |
//! | [`Device`] | a GPU and its primary context, which other libraries share |
//! | [`Stream`], [`Event`] | a queue of work, and a point in it that another stream can wait for |
//! | [`Moment`], [`waits`] | device time of work, and a count of the host's waits |
//! | [`Pinned`] | page-locked bytes of the host |
//! | [`Mail`], [`Letter`] | small messages to the device and back without waiting |
//! | [`Module`], [`Function`] | kernels, loaded from PTX |
//! | [`Graph`] | work that was captured once and is launched again and again |
//! | [`Lent`] | a buffer viewed as a cudarc slice, for libraries on cudarc |
//!
//! Memory and streams of other libraries are used without a copy: [`Buffer::from_raw_on`](crate::Buffer::from_raw_on),
//! [`Slice::from_raw_on`](crate::Slice::from_raw_on), [`SliceMut::from_raw_on`](crate::SliceMut::from_raw_on),
//! [`Buffer::from_cudarc`](crate::Buffer::from_cudarc), [`Stream::from_raw`], [`Stream::from_cudarc`].
//!
//! Device memory is a [`Buffer`](crate::Buffer) made by [`Buffer::zeroed_on`](crate::Buffer::zeroed_on) on a stream's
//! [`Queue`](crate::Queue). Work runs asynchronously to the call that enqueues it, and memory is not freed before that work is
//! done. An error in a drop is returned by the next call on the device.
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
//! copies.copy_in(&host, 0, params.as_mut())?; // asynchronous
//! compute.wait(&copies.record()?)?; // later work on `compute` sees the copy
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
