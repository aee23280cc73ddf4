//! Unusable drivers, and drivers that cannot compile kernels: each error says what to do.

use crate::cuda::{Bench, child, fail, stand_in};
use meshstep_tensor::cuda::{self, Device, Error, Module, Unavailable};

/// Empty PTX, which compiles on any driver.
const EMPTY: &str = ".version 7.0\n.target sm_80\n.address_size 64\n";

#[test]
fn a_machine_without_a_driver_says_what_is_missing() {
    match cuda::probe() {
        Ok(driver) => assert!(driver.devices > 0 && driver.version >= 12_000, "{driver:?}"),
        Err(missing @ Unavailable::NoDriver { .. }) => {
            let text = missing.to_string();
            assert!(text.contains("libcuda.so.1") && text.contains("install"), "{text}");
            // Calls that need a driver return the same error, each time.
            for _ in 0..2 {
                assert_eq!(Device::open(0).unwrap_err(), Error::Unavailable(missing.clone()));
            }
        }
        Err(other) => println!("a driver that cannot be used: {other}"),
    }
}

/// Error text expected in a process with this variable set.
fn probed_with(name: &str, value: Option<&str>) -> String {
    let output = child("cuda::drivers::what_is_probed_is_printed", &[(name, value)]);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn what_is_probed_is_printed() {
    match cuda::probe() {
        Ok(driver) => println!("probed: {driver:?}"),
        Err(missing) => println!("probed: {missing:?}\nin words: {missing}"),
    }
}

#[test]
fn unusable_drivers_are_distinguished() {
    if !stand_in() {
        return println!("skipped: needs the stand-in");
    }
    for (name, value, told) in [
        ("MESHSTEP_STANDIN", None, "is a stand-in"),
        ("MESHSTEP_STANDIN", Some("yes"), "is a stand-in"),
        ("MESHSTEP_STANDIN_VERSION", Some("11080"), "speaks version 11080; update it to one of 12000"),
        ("MESHSTEP_STANDIN_DEVICES", Some("0"), "finds no GPU"),
        ("MESHSTEP_STANDIN_DEVICES", Some("3"), "devices: 3, stand_in: true"),
        ("LD_LIBRARY_PATH", None, "no CUDA driver"),
    ] {
        let said = probed_with(name, value);
        // A machine with a real driver finds it without the path.
        let real = name == "LD_LIBRARY_PATH" && said.contains("stand_in: false");
        assert!(said.contains(told) || real, "{name}={value:?}: {said}");
    }
}

/// Folder of the stand-in for a toolkit's stub, and the loader path of this process.
fn stub_folder() -> (String, String) {
    let path = std::env::var("LD_LIBRARY_PATH").unwrap();
    let is_driver = |folder: &&str| std::path::Path::new(folder).join("libcuda.so.1").exists();
    let standin = path.split(':').find(is_driver).unwrap();
    (format!("{standin}/stub"), path.clone())
}

#[test]
fn a_toolkits_stub_is_refused_with_what_to_do() {
    if !stand_in() {
        return println!("skipped: needs the stand-in");
    }
    let (stub, path) = stub_folder();
    // With the stub alone, and with the stub before a driver: cudarc would call the stub in both cases.
    for path in [stub.clone(), format!("{stub}:{path}")] {
        let said = probed_with("LD_LIBRARY_PATH", Some(&path));
        assert!(said.contains("libcuda.so is a toolkit's stub"), "{path}: {said}");
        assert!(said.contains("take the stubs folder (lib64/stubs) out of LD_LIBRARY_PATH"), "{said}");
    }
}

#[test]
fn a_driver_without_a_ptx_compiler_says_what_to_do() {
    if !stand_in() {
        return println!("skipped: needs the stand-in");
    }
    let bench = Bench::new();
    for (code, advice) in [(221, "NVIDIA_DRIVER_CAPABILITIES"), (222, "update the driver"), (223, "unset it")]
    {
        fail("cuModuleLoadDataEx", code);
        let refused = Module::load(&bench.device, EMPTY).unwrap_err();
        let known = matches!(
            (code, &refused),
            (221, Error::NoPtxCompiler) | (222, Error::PtxTooNew { .. }) | (223, Error::PtxDisabled)
        );
        let text = refused.to_string();
        assert!(known && text.contains(advice) && text.contains("feature `cubins`"), "{code}: {text}");
    }
    Module::load(&bench.device, EMPTY).unwrap();
}

#[test]
fn what_loads_a_module_prints_the_error() {
    if cuda::probe().is_ok() {
        println!("loaded: {:?}", Module::load(&Device::open(0).unwrap(), EMPTY).map(drop));
    }
}

#[test]
fn ptx_that_the_environment_forbids_to_compile_is_an_error_that_names_it() {
    if !stand_in() {
        return println!("skipped: needs the stand-in");
    }
    for (value, told) in [("1", "loaded: Err(CUDA_DISABLE_PTX_JIT forbids"), ("0", "loaded: Ok(())")] {
        let output = child(
            "cuda::drivers::what_loads_a_module_prints_the_error",
            &[("CUDA_DISABLE_PTX_JIT", Some(value))],
        );
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(said.contains(told), "{value}: {said}");
    }
}

#[test]
fn an_ordinal_out_of_range_is_an_error_with_the_range() {
    if !stand_in() {
        return println!("skipped: needs the stand-in");
    }
    let devices = cuda::probe().unwrap().devices;
    let refused = Device::open(devices).unwrap_err();
    assert_eq!(refused.to_string(), format!("there is no device {devices}; use one below {devices}"));
}
