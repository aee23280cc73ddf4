//! `gpu-runner MODE`: runs the programs of the GPU bundle in the folder of this executable.

#[cfg(target_os = "linux")]
mod runner;

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    runner::main()
}

#[cfg(not(target_os = "linux"))]
fn main() -> Result<(), &'static str> {
    Err("the GPU bundle is for Linux; run it there")
}
