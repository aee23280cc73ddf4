//! The stand-in runs the blocks of a launch in orders and interleavings drawn from its seed.

use crate::cuda::gpu::queue;
use crate::cuda_kernels::blocks::NOTES;
use crate::cuda_kernels::interleaved::KERNELS;
use meshstep_simt as simt;
use meshstep_tensor::cuda::{self, Device, Module};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::ffi::c_void;
use std::process::Command;

const BLOCKS: usize = 16;
const PTX: &str = ".version 7.0\n.visible .entry note_blocks (\n)\n.visible .entry add_over_a_barrier (\n)";
const LAUNCHES: usize = 64;

/// Returns the order in which the blocks of one launch ran.
fn order(queue: &Queue) -> Vec<u64> {
    let stream = queue.stream().unwrap();
    let zeros = || Buffer::zeroed_on(queue, BLOCKS, DType::U64, &Meter::new(), Category::State).unwrap();
    let (count, notes) = (zeros(), zeros());
    let kernel = Module::load(stream.device(), PTX).unwrap().function("note_blocks").unwrap();
    let (mut at, mut to) = (count.as_slice().address() as u64, notes.as_slice().address() as u64);
    let mut arguments: [*mut c_void; 2] = [(&raw mut at).cast(), (&raw mut to).cast()];
    // SAFETY: two addresses, of a counter and of a slot for each block; both buffers live until they are read.
    unsafe { stream.launch(&kernel, (BLOCKS as u32, 32), &mut arguments) }.unwrap();
    let mut pairs = [0u64; BLOCKS];
    queue.download(notes.as_slice(), (&mut pairs[..]).into()).unwrap();
    let halves = pairs.iter().flat_map(|pair| [pair & 0xFFFF_FFFF, pair >> 32]);
    halves.take(BLOCKS).collect()
}

/// Returns a sum to which each block adds 1, with a barrier between its load and its store.
fn total(queue: &Queue) -> u64 {
    let stream = queue.stream().unwrap();
    let total = Buffer::zeroed_on(queue, 1, DType::U64, &Meter::new(), Category::State).unwrap();
    let kernel = Module::load(stream.device(), PTX).unwrap().function("add_over_a_barrier").unwrap();
    let mut at = total.as_slice().address() as u64;
    let mut arguments: [*mut c_void; 1] = [(&raw mut at).cast()];
    // SAFETY: the address of a number; its buffer lives until it is read.
    unsafe { stream.launch(&kernel, (BLOCKS as u32, 64), &mut arguments) }.unwrap();
    let mut found = [0u64];
    queue.download(total.as_slice(), (&mut found[..]).into()).unwrap();
    found[0]
}

#[test]
fn a_process_that_prints_orders_of_blocks() {
    if std::env::var_os("OPTIM_TEST_BLOCKS").is_none() {
        return;
    }
    let queue = Queue::cuda(cuda::Stream::new(&Device::open(0).unwrap()).unwrap());
    for _ in 0..4 {
        println!("order: {:?}", order(&queue));
    }
    for _ in 0..LAUNCHES {
        println!("total: {}", total(&queue));
    }
}

/// Returns the output of a process with the tests' kernels; `None` without the stand-in.
fn said() -> Option<String> {
    if queue().is_none() || !cuda::probe().unwrap().stand_in {
        println!("skipped: needs the stand-in");
        return None;
    }
    let devices = [simt::Device::compile(NOTES, "")?, simt::Device::compile(KERNELS, "")?];
    // A folder with these kernels only, instead of the committed ones.
    let kernels = devices[0].file().with_extension("kernels");
    std::fs::create_dir_all(&kernels).unwrap();
    for (device, name) in devices.iter().zip(["notes.so", "sums.so"]) {
        std::fs::copy(device.file(), kernels.join(name)).unwrap();
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "cuda::blocks::a_process_that_prints_orders_of_blocks", "--nocapture"]);
    let output =
        child.env("OPTIM_TEST_BLOCKS", "1").env("MESHSTEP_STANDIN_KERNELS", &kernels).output().unwrap();
    Some(String::from_utf8(output.stdout).unwrap())
}

#[test]
fn launches_draw_orders_and_interleavings_of_their_blocks() {
    let Some(said) = said() else { return };
    let mut orders: Vec<&str> = said.lines().filter(|line| line.starts_with("order: ")).collect();
    assert_eq!(orders.len(), 4, "{said}");
    orders.sort_unstable();
    orders.dedup();
    assert_eq!(orders.len(), 4, "{said}");
    // If the blocks of a launch are interleaved, some lose the additions of others; most launches run one block at a time.
    let totals = said.lines().filter_map(|line| line.strip_prefix("total: "));
    let totals: Vec<usize> = totals.map(|total| total.parse().unwrap()).collect();
    let torn = totals.iter().filter(|&&total| total < BLOCKS).count();
    assert!(totals.len() == LAUNCHES && (1..LAUNCHES / 2).contains(&torn), "{torn} torn: {totals:?}");
}
