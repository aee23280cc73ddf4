//! Whole runs of `run.sh` on bundles whose programs are shell scripts.

mod bundle;
mod endings;
mod modes;
mod verdicts;
