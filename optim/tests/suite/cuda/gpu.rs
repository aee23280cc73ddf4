//! A GPU for tests, and transfers of values in both directions.

use crate::common::{Random, Values, long};
use meshstep_tensor::cuda::{self, Device, Stream};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};

/// Lengths around a warp, a tile and a grid.
pub(crate) const LENS: [usize; 8] = [0, 1, 127, 128, 129, 65_535, 65_537, 278_011];

/// Returns a stream of the first device, or `None` without a device; REQUIRE_GPU=1 makes that a failure.
pub(crate) fn queue() -> Option<Queue> {
    if let Err(missing) = cuda::probe() {
        assert!(std::env::var_os("REQUIRE_GPU").is_none(), "{missing}");
        println!("skipped: {missing}");
        return None;
    }
    Some(Queue::cuda(Stream::new(&Device::open(0).unwrap()).unwrap()))
}

/// Returns true if every combination is tried: in a long run, and on a real GPU, which is fast.
pub(crate) fn all() -> bool {
    long() || !cuda::probe().is_ok_and(|driver| driver.stand_in)
}

/// Returns values of every kind.
pub(crate) fn wild(dtype: DType, len: usize, seed: u64) -> Values {
    let mut random = Random::new(seed);
    Values::new(dtype, len, || random.any())
}

/// Uploads values to the queue's device.
pub(crate) fn upload(values: &Values, queue: &Queue) -> Buffer {
    let slice = values.slice();
    let (len, dtype) = (slice.len(), slice.dtype());
    let mut buffer = Buffer::zeroed_on(queue, len, dtype, &Meter::new(), Category::State).unwrap();
    queue.upload(slice, buffer.as_mut()).unwrap();
    buffer
}

/// Downloads a buffer of the queue's device into `values`.
pub(crate) fn download(buffer: &Buffer, values: &mut Values, queue: &Queue) {
    queue.download(buffer.as_slice(), values.slice_mut()).unwrap();
}

/// Returns the first element with bits that differ from `expected`, with all NaN equal.
pub(crate) fn difference(buffer: &Buffer, expected: &Values, queue: &Queue) -> Option<usize> {
    let mut found = expected.clone();
    download(buffer, &mut found, queue);
    found.bits().iter().zip(expected.bits()).position(|(&a, b)| a != b)
}
