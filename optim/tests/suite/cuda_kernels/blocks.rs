//! The stand-ins run the blocks of a grid in an order drawn from a seed.

use meshstep_simt::Device;
use std::ffi::c_void;

const BLOCKS: usize = 16;

/// Kernel with blocks that record their indices in execution order.
pub(crate) const NOTES: &str = r#"
extern "C" __global__ void note_blocks(unsigned* count, unsigned* order) {
    if (threadIdx.x == 0) order[atomicAdd(count, 1u)] = blockIdx.x;
}
"#;

fn order(device: &Device, seed: u64) -> Vec<u32> {
    let (mut count, mut order) = (0u32, vec![u32::MAX; BLOCKS]);
    let (mut at, mut to) = (&raw mut count, order.as_mut_ptr());
    let mut arguments: [*mut c_void; 2] = [(&raw mut at).cast(), (&raw mut to).cast()];
    device.shuffle(seed);
    // SAFETY: two pointers, to a counter and to a slot for each block.
    unsafe { device.launch("note_blocks", BLOCKS as u32, 32, &mut arguments) }.unwrap();
    order
}

#[test]
fn a_seed_draws_the_order_of_blocks() {
    let Some(device) = Device::compile(NOTES, "") else { return };
    let in_order: Vec<u32> = (0..BLOCKS as u32).collect();
    assert_eq!(order(&device, 0), in_order);
    let orders: Vec<Vec<u32>> = (1..=8).map(|seed| order(&device, seed)).collect();
    for (i, one) in orders.iter().enumerate() {
        let mut sorted = one.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, in_order, "each block runs once");
        assert!(orders[..i].iter().all(|other| other != one), "seeds draw different orders: {orders:?}");
        assert_eq!(order(&device, i as u64 + 1), *one, "a seed draws one order");
    }
}
