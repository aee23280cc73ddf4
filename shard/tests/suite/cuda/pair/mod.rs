//! Two ranks as processes, each with a role.

mod failures;
mod results;

use crate::common::gpu_pair::{Process, Rank, Role, finish, minute, play, ready, ready_pair};

const ROLES: &[Role] = &[
    ("steps", minute, results::steps),
    ("precisions", minute, results::precisions),
    ("flips", minute, results::flips),
    ("steps until failure", failures::deadline, failures::steps_until_failure),
    ("sleeps", failures::deadline, failures::sleeps),
    ("aborts", failures::deadline, failures::aborts),
];

#[test]
fn one_of_two_ranks() {
    play(ROLES);
}
