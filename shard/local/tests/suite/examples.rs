//! The crate's example and the text that it prints.

#![allow(dead_code, reason = "tests call `run`, and nothing calls `main`")]

#[path = "../../examples/workers.rs"]
mod workers;

#[test]
fn workers() {
    let text = workers::run().unwrap();
    print!("{text}");
    let (lines, last) = text.trim_end().rsplit_once('\n').unwrap();
    assert_eq!(last, "workers 0, 1 and 3 end with the same parameters: true");
    let steps = [(0, 64), (0, 64), (0, 16), (31, 64)];
    for ((id, line), (first, last)) in lines.lines().enumerate().zip(steps) {
        assert!(line.starts_with(&format!("worker {id}: steps {first} to {last}, loss ")), "{text}");
        let number = |word: &str| word.trim_end_matches(',').parse::<f64>().ok();
        let numbers: Vec<f64> = line.split(' ').filter_map(number).collect();
        let [.., begun, ended, sent, every_step] = numbers[..] else { panic!("{text}") };
        // Worker 3 begins with the others' parameters.
        assert!(ended < 0.2 * begun || id == 2 || id == 3 && ended < 0.5, "{text}");
        assert!(0.0 < sent && sent < 0.7 * every_step, "{text}");
    }
    assert_eq!(lines.lines().count(), 4);
}
