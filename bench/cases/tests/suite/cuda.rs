//! The variants of kernels, on a GPU or on the stand-in for its driver.

use meshstep_bench_cases::gpu::variants;
use meshstep_tensor::Queue;
use meshstep_tensor::cuda::{self, Device, Stream};

/// Within a tile, at tile boundaries, and more tiles than a grid of the stand-in has blocks.
const LENS: [usize; 6] = [1, 1023, 1024, 8192, 8195, 50_001];

#[test]
fn variants_have_their_bases_bits() {
    let driver = match cuda::probe() {
        Ok(driver) => driver,
        Err(missing) => {
            assert!(std::env::var_os("REQUIRE_GPU").is_none(), "{missing}");
            return println!("skipped: {missing}");
        }
    };
    let device = Device::open(0).unwrap();
    let capability = device.capability().unwrap();
    let queue = Queue::cuda(Stream::new(&device).unwrap());
    for variant in variants() {
        match variant.unfit(capability).filter(|_| !driver.stand_in) {
            Some(reason) => println!("skipped: {}: {reason}", variant.name()),
            None => LENS.iter().for_each(|&len| assert_eq!(variant.compare(len, &queue).unwrap(), len)),
        }
    }
}
