//! The crate's examples. Each is a module here, so that it is compiled with the tests, and returns the text that its `main` prints.

#![allow(dead_code, reason = "tests call `run`, and nothing calls `main`")]

#[path = "../../examples/custom_rule.rs"]
mod custom_rule;
#[path = "../../examples/lbfgs.rs"]
mod lbfgs;

#[test]
fn lbfgs() {
    let text = lbfgs::run().unwrap();
    print!("{text}");
    let (head, ranks) = text.split_once('\n').unwrap();
    assert!(head.starts_with("loss 0.693 to 0.") && head.ends_with(", ended by Gradient"), "{text}");
    for (rank, line) in ranks.lines().enumerate() {
        assert!(line.starts_with(&format!("rank {rank} holds ")), "{text}");
        assert!(line.ends_with("weights within 1e-4 of one rank's: true"), "{text}");
        let bytes: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        // The rank, its bytes, and those of one rank with the whole history.
        assert!(bytes[0] == rank as u64 && bytes[1] * 3 < bytes[2], "{text}");
    }
    assert_eq!(ranks.lines().count(), 4);
}

#[test]
fn custom_rule() {
    let text = custom_rule::run().unwrap();
    let of = |len: usize| format!("{len} elements of m on this rank, w within 0.01 of its minimum: true\n");
    let expected = [of(256), of(64).repeat(4), "the same bits on 1 and on 4 ranks: true\n".to_owned()];
    assert_eq!(text, expected.concat());
}
