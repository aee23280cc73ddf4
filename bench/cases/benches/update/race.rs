//! Runs contestants in turns, and returns the median of each.

use std::time::Instant;

/// Returns medians in seconds over `rounds` rounds; each round runs all contestants once.
pub(crate) fn race<X, const N: usize>(
    on: &mut X,
    rounds: usize,
    contestants: [&dyn Fn(&mut X); N],
) -> [f64; N] {
    let mut times = [(); N].map(|()| Vec::new());
    for round in 0..=rounds {
        for (work, times) in contestants.iter().zip(&mut times) {
            let start = Instant::now();
            work(on);
            // The first round touches the memory and starts the threads.
            if round > 0 {
                times.push(start.elapsed().as_secs_f64());
            }
        }
    }
    times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    })
}
