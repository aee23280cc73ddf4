//! Number of blocks of a launch, as the stand-in for the driver counts them.

use crate::common::Memory;
use crate::cuda::gpu::{queue, upload, wild};
use crate::cuda::update::{There, recipes};
use meshstep_optim::cuda::{Group, StepBlock, Update, kernel, norm_kernel, norm_tile, tile};
use meshstep_optim::{AdamW, Norm, NormSum, Rule, Segment};
use meshstep_tensor::{DType, Meter, Queue, cuda};
use std::ffi::{CString, c_char};

/// Blocks that the stand-in holds at once: two on each of three multiprocessors.
const RESIDENT: u64 = 6;

/// Numbers of tiles around one wave and sixteen waves.
const TILES: [u64; 7] = [1, 5, 6, 7, 96, 97, 200];

/// Returns a stream of the stand-in, or `None` without the stand-in.
fn stand_in() -> Option<Queue> {
    let queue = queue().filter(|_| cuda::probe().unwrap().stand_in);
    if queue.is_none() {
        println!("skipped: needs the stand-in");
    }
    queue
}

/// Returns the number of blocks of a kernel's last launch.
fn blocks(kernel: String) -> u64 {
    type Blocks = extern "C" fn(*const c_char) -> usize;
    let name = CString::new(kernel).unwrap();
    // SAFETY: the stand-in is loaded and stays, and documents this type.
    unsafe {
        let driver = libloading::Library::new("libcuda.so.1").unwrap();
        driver.get::<Blocks>(b"meshstep_standin_blocks").unwrap()(name.as_ptr()) as u64
    }
}

#[test]
fn updates_have_a_block_for_each_tile_or_sixteen_waves() {
    let Some(queue) = stand_in() else { return };
    let (rule, meter) = (AdamW::default(), Meter::new());
    let family = rule.on_device().unwrap().family;
    let mut limited = 0;
    for recipe in recipes().into_iter().filter(|recipe| recipe.suits(&rule)) {
        for tiles in TILES {
            let len = (tiles * tile(recipe.params)) as usize - 5;
            let mut there = There::new(&Memory::of(&rule, &recipe, len, 1), &queue);
            let segments = [Segment::new(0..len, 1)];
            let groups = [Group { rule: &rule, lr_scale: 1.0, segments: &segments, params: &[] }];
            let name = there.flat(0, |flat| kernel(family, &flat));
            let made = there.flat(0, |flat| Update::new(&flat, &groups, recipe.rounding, &queue, &meter));
            // Every block of a step that skips ends at once.
            let (mut update, skip) = (made.unwrap(), StepBlock::new(&queue, &meter).unwrap());
            there.flat(0, |flat| update.run(flat, &skip, &queue)).unwrap();
            queue.synchronize().unwrap();
            // Kernels with 16-bit parameters or state have this in their names.
            let most = if name.contains("bf16") { 16 * RESIDENT } else { u64::MAX };
            limited += u32::from(tiles > most);
            assert_eq!(blocks(name), tiles.min(most), "{recipe:?}: {tiles} tiles");
        }
    }
    assert!(limited > 0);
}

#[test]
fn norms_have_one_wave() {
    let Some(queue) = stand_in() else { return };
    for dtype in [DType::F32, DType::BF16] {
        for tiles in TILES {
            let values = wild(dtype, (tiles * norm_tile(dtype)) as usize - 5, tiles);
            let mut sum = NormSum::new(Norm::L2, &queue, &Meter::new()).unwrap();
            sum.add(upload(&values, &queue).as_slice(), &queue).unwrap();
            queue.synchronize().unwrap();
            let name = norm_kernel(Norm::L2, dtype).unwrap();
            assert_eq!(blocks(name), tiles.min(RESIDENT), "{dtype}: {tiles} tiles");
        }
    }
}
