//! `gpu-runner MODE`: runs the programs of the GPU bundle whose folder holds this program.

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
