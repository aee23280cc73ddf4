//! The stand-in detects accesses that a GPU's memory does not allow: each misuse runs in a separate process, which it ends or
//! breaks.

use crate::cuda::{Bench, child, stand_in, values};
use cudarc::driver::sys;
use meshstep_tensor::Buffer;
use meshstep_tensor::cuda::{Function, Module};
use std::ffi::c_void;
use std::os::unix::process::ExitStatusExt;

/// Variable that gives a process its role.
const ROLE: &str = "TENSOR_TEST_FAULT";
const LEN: usize = 64;

/// A kernel of the stand-in's: `cast_f32_f16(dst, src, len)`.
fn cast(bench: &Bench) -> Function {
    let ptx = ".version 7.0\n.visible .entry cast_f32_f16 (\n)";
    Module::load(&bench.device, ptx).unwrap().function("cast_f32_f16").unwrap()
}

/// Launches the kernel with these addresses, waits for it, and returns the driver's error code.
fn launched(bench: &Bench, mut to: u64, mut from: u64, mut len: u64) -> u32 {
    let mut arguments = [(&raw mut to).cast::<c_void>(), (&raw mut from).cast(), (&raw mut len).cast()];
    // SAFETY: three arguments of the kernel's types; the test is about the memory that they point at.
    unsafe { bench.stream.launch(&cast(bench), (1, 256), &mut arguments) }.unwrap();
    // SAFETY: the stream lives.
    unsafe { sys::cuStreamSynchronize(bench.stream.as_raw().cast()) as u32 }
}

/// Copies from this address to the host and returns the driver's error code.
fn copied(bench: &Bench, from: u64) -> u32 {
    let mut bytes = [0u8; 16];
    // SAFETY: the place has this many bytes and outlives the call; the test is about the address.
    unsafe {
        sys::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, 16, bench.stream.as_raw().cast()) as u32
    }
}

fn address(buffer: &Buffer) -> u64 {
    buffer.as_slice().address() as u64
}

#[test]
fn a_process_that_misuses_device_memory() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let bench = Bench::new();
    let (to, from, freed) = (bench.buffer(2 * LEN), bench.buffer(2 * LEN), bench.buffer(2 * LEN));
    let gone = address(&freed);
    drop(freed);
    let host = values(2 * LEN, 1);
    let code = match role.as_str() {
        "right launch" => launched(&bench, address(&to), address(&from), LEN as u64),
        "freed argument" => launched(&bench, address(&to), gone, LEN as u64),
        "host argument" => launched(&bench, address(&to), host.as_ptr().addr() as u64, LEN as u64),
        "launch past the end" => launched(&bench, address(&to), address(&from), 1 << 16),
        "freed source" => copied(&bench, gone),
        "source past the end" => copied(&bench, address(&from) + 4 * LEN as u64 - 8),
        "host reads" => {
            let place = std::ptr::with_exposed_provenance::<u8>(address(&from) as usize);
            // SAFETY: none; the test is about this read, and the stand-in ends the process.
            u32::from(unsafe { place.read_volatile() })
        }
        other => panic!("no such role: {other}"),
    };
    println!("code: {code}");
    // No object is dropped: after a sticky error every call fails.
    std::process::exit(0);
}

#[test]
fn misuse_of_device_memory_is_refused_or_ends_the_process() {
    if !stand_in() {
        return println!("skipped: needs the stand-in");
    }
    const SIGSEGV: i32 = 11;
    for (role, expected) in [
        ("right launch", Some("code: 0")),
        ("freed argument", Some("code: 700")),
        ("host argument", Some("code: 700")),
        ("freed source", Some("code: 700")),
        ("source past the end", Some("code: 700")),
        ("launch past the end", None),
        ("host reads", None),
    ] {
        let output = child("cuda::faults::a_process_that_misuses_device_memory", &[(ROLE, Some(role))]);
        let said = String::from_utf8_lossy(&output.stdout);
        match expected {
            Some(code) => assert!(said.contains(code) && output.status.success(), "{role}: {output:?}"),
            None => {
                let words = String::from_utf8_lossy(&output.stderr);
                assert_eq!(output.status.signal(), Some(SIGSEGV), "{role}: {output:?}");
                assert!(words.contains("stand-in: access to device memory"), "{role}: {words}");
            }
        }
    }
}
