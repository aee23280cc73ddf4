//! The crate's examples and the texts that they print; the tests of `with_torch` are in its folder.

#![allow(dead_code, reason = "tests call `run`, and nothing calls `main`")]

#[path = "../../examples/pytorch.rs"]
mod pytorch;
#[path = "../../examples/with_torch/main.rs"]
mod with_torch;

#[test]
fn pytorch() {
    let text = pytorch::run().unwrap();
    print!("{text}");
    for (name, shape) in
        [("wte.weight", "[5,3]"), ("h.0.bias", "[7]"), ("h.0.weight", "[2,2,3]"), ("scale", "[1]")]
    {
        for key in [name.to_owned(), format!("state.{name}.exp_avg"), format!("state.{name}.exp_avg_sq")] {
            assert!(text.contains(&format!("  {key} F32 {shape}\n")), "{key}: {text}");
        }
        assert!(text.contains(&format!("  state.{name}.step F32 []\n")), "{text}");
    }
    let end = "two ranks go on from the checkpoint with the same bits: true\n\
               two ranks go on from the file with the same bits: true\n\
               four ranks go on from PyTorch's step 20 to step 25\n";
    assert!(text.ends_with(end), "{text}");
}
