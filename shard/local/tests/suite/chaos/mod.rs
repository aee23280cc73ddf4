//! Workers that train by a plan while a seeded schedule kills them or one of their ranks, stalls them, adds others and restarts the
//! arbiter. After every step each worker's state must equal that of a loop over plain vectors. `MESHSTEP_SEED=n` repeats one
//! schedule and prints its events.

mod baton;
mod group;
mod model;
mod named;
mod place;
mod schedule;
mod truth;
mod worker;
mod world;

use crate::common::cases;
use meshstep_cases::seeds::{only, seeds};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use world::{End, World};

/// Runs a seed to its end.
fn run(seed: u64) -> std::sync::Arc<World> {
    let world = schedule::world(seed);
    let result = catch_unwind(AssertUnwindSafe(|| world.run()));
    if std::env::var_os("MESHSTEP_SEED").is_some() {
        world.lock().log.iter().for_each(|(time, text)| println!("{time:?} {text}"));
        println!("{:?}", world.setup);
    }
    if let Err(panic) = result {
        println!("seed {seed}: MESHSTEP_SEED={seed} repeats it");
        resume_unwind(panic);
    }
    world
}

mod whatever_happens_survivors_have_what_plain_loops_have {
    meshstep_cases::ten_parts! { super::survivors_have_what_plain_loops_have }
}

fn survivors_have_what_plain_loops_have(part: u64) {
    let seeds = seeds(part, cases(500, 5000));
    let (mut ends, mut commits, mut aborts, mut of_two) = (BTreeMap::new(), 0, 0, 0);
    for &seed in &seeds {
        let world = run(seed);
        let inner = world.lock();
        of_two += usize::from(world.setup.ranks == 2);
        commits += inner.truth.commits.len();
        aborts += inner.truth.decided.len() - inner.truth.commits.len();
        for life in &inner.lives {
            let end = match life.end.as_ref().unwrap() {
                End::Error(error) => error.split(|c: char| c.is_ascii_digit()).next().unwrap().to_owned(),
                end => format!("{end:?}"),
            };
            *ends.entry(end).or_insert(0) += 1;
        }
        if seed % 100 == part || only().is_some() {
            let again = run(seed);
            assert!(again.lock().log == inner.log, "seed {seed} does not repeat");
        }
    }
    println!("{commits} commits, {aborts} aborts, {of_two} with workers of two ranks; {ends:#?}");
    // No worker asks for another step's exchange than the others.
    assert!(!ends.contains_key("worker "), "{ends:#?}");
    // With few seeds the minimum is lower, and with very few there is none.
    let least = |n: usize| n * seeds.len() / if seeds.len() < 50 { 1000 } else { 500 };
    let some = |end: &str| ends.get(end).is_some_and(|&n| n > least(50));
    let loud =
        aborts > least(200) && commits > least(2000) && of_two > least(125) && some("Left") && some("Died");
    assert!(seeds.len() < 20 || loud, "too quiet");
}
