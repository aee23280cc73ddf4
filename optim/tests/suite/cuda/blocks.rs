//! Launches on the stand-in run their blocks in orders that its seed draws.

use crate::cuda::gpu::queue;
use crate::cuda_kernels::blocks::NOTES;
use meshstep_simt as simt;
use meshstep_tensor::cuda::{self, Device, Module};
use meshstep_tensor::{Buffer, Category, DType, Meter, Queue};
use std::ffi::c_void;
use std::process::Command;

const BLOCKS: usize = 16;
const PTX: &str = ".version 7.0\n.visible .entry note_blocks (\n)";

/// The order in which the blocks of one launch came.
fn order(queue: &Queue) -> Vec<u64> {
    let stream = queue.stream().unwrap();
    let zeros = || Buffer::zeroed_on(queue, BLOCKS, DType::U64, &Meter::new(), Category::State).unwrap();
    let (count, notes) = (zeros(), zeros());
    let kernel = Module::load(stream.device(), PTX).unwrap().function("note_blocks").unwrap();
    let (mut at, mut to) = (count.as_slice().address() as u64, notes.as_slice().address() as u64);
    let mut arguments: [*mut c_void; 2] = [(&raw mut at).cast(), (&raw mut to).cast()];
    // SAFETY: two addresses, of a counter and of a place for each block, which live until they are read.
    unsafe { stream.launch(&kernel, (BLOCKS as u32, 32), &mut arguments) }.unwrap();
    let mut pairs = [0u64; BLOCKS];
    queue.download(notes.as_slice(), (&mut pairs[..]).into()).unwrap();
    let halves = pairs.iter().flat_map(|pair| [pair & 0xFFFF_FFFF, pair >> 32]);
    halves.take(BLOCKS).collect()
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
}

#[test]
fn each_launch_draws_an_order_of_its_blocks() {
    if queue().is_none() || !cuda::probe().unwrap().stand_in {
        return println!("skipped: needs the stand-in");
    }
    let Some(device) = simt::Device::compile(NOTES, "") else { return };
    // A folder with this kernel alone, in the place of the committed ones.
    let kernels = device.file().with_extension("kernels");
    std::fs::create_dir_all(&kernels).unwrap();
    std::fs::copy(device.file(), kernels.join("notes.so")).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "cuda::blocks::a_process_that_prints_orders_of_blocks", "--nocapture"]);
    let output =
        child.env("OPTIM_TEST_BLOCKS", "1").env("MESHSTEP_STANDIN_KERNELS", &kernels).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let mut orders: Vec<&str> = said.lines().filter(|line| line.starts_with("order: ")).collect();
    assert_eq!(orders.len(), 4, "{said}");
    orders.sort_unstable();
    orders.dedup();
    assert_eq!(orders.len(), 4, "{said}");
}
