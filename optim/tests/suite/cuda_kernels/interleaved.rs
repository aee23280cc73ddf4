//! Blocks of a grid in flight together, on the stand-in for a device's threads: this reveals kernels that assume a block runs alone,
//! which sequential blocks would hide.

use meshstep_simt::{Device, EVERY_ACCESS};
use std::ffi::c_void;

const BLOCKS: u32 = 8;
const THREADS: u32 = 64;

/// Number of seeds that finds each race. The rarest one shows in about one launch of twenty.
const SEEDS: u64 = 128;

/// Kernels that add 1 for each block, with and without a race.
pub(crate) const KERNELS: &str = r#"
typedef unsigned u32;

// Each block adds 1. Between its load and its store is a barrier.
extern "C" __global__ void add_over_a_barrier(u32* total) {
    __shared__ u32 before;
    if (threadIdx.x == 0) before = *total;
    __syncthreads();
    if (threadIdx.x == 1) *total = before + 1;
}

// Each block adds 1, with nothing in between.
extern "C" __global__ void add_at_once(u32* total) {
    if (threadIdx.x == 0) *total += 1;
}

extern "C" __global__ void add_atomically(u32* total) {
    if (threadIdx.x == 0) atomicAdd(total, 1u);
}

// The last block to count itself adds up what all have written: `at` has the total, the counter, and a part for each block.
template <bool WRITES_FIRST, bool COUNTS_ATOMICALLY>
__device__ void add_in_the_last_block(u32* at) {
    __shared__ bool last;
    u32 *count = at + 1, *parts = at + 2;
    if (threadIdx.x == 0) {
        if (WRITES_FIRST) parts[blockIdx.x] = 1;
        __threadfence();
        u32 before = *count;
        if (COUNTS_ATOMICALLY) {
            before = atomicAdd(count, 1u);
        } else {
            __threadfence();
            *count = before + 1;
        }
        if (!WRITES_FIRST) parts[blockIdx.x] = 1;
        last = before == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0)
        for (u32 i = 0; i < gridDim.x; i++) *at += parts[i];
}
extern "C" __global__ void last_block(u32* at) { add_in_the_last_block<true, true>(at); }
extern "C" __global__ void last_block_counts_first(u32* at) { add_in_the_last_block<false, true>(at); }
extern "C" __global__ void last_block_counts_without_atomic(u32* at) { add_in_the_last_block<true, false>(at); }

// Each block counts to 1 if its shared memory is its own.
template <int N>
__device__ void exchange(u32* at) {
    __shared__ u32 given[N], sum;
    given[threadIdx.x] = blockIdx.x;
    if (threadIdx.x == 0) sum = 0;
    __syncthreads();
    atomicAdd(&sum, given[(threadIdx.x + 33) % N]);
    __syncthreads();
    if (threadIdx.x == 0 && sum == N * blockIdx.x) atomicAdd(at, 1u);
}
extern "C" __global__ void own_shared_memory(u32* at) { exchange<64>(at); }

// Block 3 never ends; the others count.
extern "C" __global__ void stuck(u32* at) {
    if (threadIdx.x == 0) atomicAdd(at, 1u);
    if (blockIdx.x == 3 && threadIdx.x == 0) return;
    __syncthreads();
}
"#;

/// Returns the first number in memory after a launch with `in_flight` interleaved blocks.
fn total(device: &Device, kernel: &str, seed: u64, in_flight: u32) -> Result<u32, String> {
    let mut memory = [0u32; 2 + BLOCKS as usize];
    let mut at = memory.as_mut_ptr();
    device.shuffle(seed);
    device.interleave(in_flight);
    // SAFETY: one pointer, to a total, a counter and a part for each block.
    unsafe { device.launch(kernel, BLOCKS, THREADS, &mut [(&raw mut at).cast::<c_void>()]) }?;
    Ok(memory[0])
}

/// Returns the seeds with which a launch leaves a wrong number.
fn wrong(device: &Device, kernel: &str, in_flight: u32) -> Vec<u64> {
    (1..=SEEDS).filter(|&seed| total(device, kernel, seed, in_flight).unwrap() != BLOCKS).collect()
}

const RACES: [&str; 3] =
    ["add_over_a_barrier", "last_block_counts_first", "last_block_counts_without_atomic"];
const RIGHT: [&str; 3] = ["add_atomically", "last_block", "own_shared_memory"];

#[test]
fn races_between_blocks_are_found_by_interleaving_alone() {
    let Some(device) = Device::compile(KERNELS, "") else { return };
    for kernel in RACES {
        assert_eq!(wrong(&device, kernel, 1), [0; 0], "{kernel}: one block after the other hides it");
        for in_flight in 2..=4 {
            assert!(!wrong(&device, kernel, in_flight).is_empty(), "{kernel}, {in_flight} in flight");
        }
    }
}

#[test]
fn kernels_without_a_race_are_right_however_they_are_interleaved() {
    let Some(device) = Device::compile(KERNELS, "") else { return };
    for kernel in RIGHT {
        for in_flight in [1, 2, 3, 8, 100] {
            assert_eq!(wrong(&device, kernel, in_flight), [0; 0], "{kernel}, {in_flight} in flight");
        }
    }
}

#[test]
fn a_seed_draws_one_interleaving() {
    let Some(device) = Device::compile(KERNELS, "") else { return };
    let totals = || -> Vec<u32> {
        (1..=SEEDS).map(|seed| total(&device, "add_over_a_barrier", seed, 4).unwrap()).collect()
    };
    let first = totals();
    assert!(first.iter().any(|total| *total != first[0]), "{first:?}");
    assert_eq!(totals(), first);
}

#[test]
fn with_points_at_every_access_a_plain_sum_is_torn() {
    let Some(plain) = Device::compile(KERNELS, "") else { return };
    let every = Device::compile(KERNELS, EVERY_ACCESS).unwrap();
    assert_eq!(wrong(&plain, "add_at_once", 4), [0; 0], "a load and a store without a point between");
    assert_eq!(wrong(&every, "add_at_once", 1), [0; 0]);
    assert!(!wrong(&every, "add_at_once", 4).is_empty());
    for kernel in RACES {
        assert!(!wrong(&every, kernel, 4).is_empty(), "{kernel}");
    }
    for kernel in RIGHT {
        assert_eq!(wrong(&every, kernel, 4), [0; 0], "{kernel}");
    }
}

#[test]
fn a_block_that_never_ends_ends_the_launch_and_no_later_one() {
    let Some(device) = Device::compile(KERNELS, "") else { return };
    for in_flight in [1, 4] {
        let error = total(&device, "stuck", 5, in_flight).unwrap_err();
        assert!(error.contains("never reach"), "{error}");
        assert_eq!(wrong(&device, "own_shared_memory", in_flight), [0; 0]);
    }
}
