//! Seeds of a simulation, divided among ten tests so that the cores share them.

const PARTS: u64 = 10;

/// The seeds of one of the ten tests: those of `0..count` with `part` as their last digit.
///
/// `MESHSTEP_SEED=n` runs only that seed, in the test that it belongs to.
pub fn seeds(part: u64, count: u32) -> Vec<u64> {
    match only() {
        Some(seed) => Some(seed).into_iter().filter(|seed| seed % PARTS == part).collect(),
        None => (part..u64::from(count)).step_by(PARTS as usize).collect(),
    }
}

/// Returns the requested seed, if there is one.
pub fn only() -> Option<u64> {
    let seed = std::env::var("MESHSTEP_SEED").ok()?;
    Some(seed.parse().unwrap_or_else(|_| panic!("MESHSTEP_SEED is {seed:?}; a seed is a number")))
}

/// Ten tests that call `$body` with the number of their part.
#[macro_export]
macro_rules! ten_parts {
    ($body:path) => {
        $crate::parts! { $body: part_0 0, part_1 1, part_2 2, part_3 3, part_4 4, part_5 5, part_6 6, part_7 7, part_8 8, part_9 9 }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! parts {
    ($body:path: $($name:ident $part:literal),*) => {
        $(#[test] fn $name() { $body($part) })*
    };
}

#[test]
fn every_seed_is_in_one_part() {
    if only().is_some() {
        return;
    }
    let mut all: Vec<u64> = (0..PARTS).flat_map(|part| seeds(part, 503)).collect();
    all.sort_unstable();
    assert_eq!(all, (0..503).collect::<Vec<_>>());
}
