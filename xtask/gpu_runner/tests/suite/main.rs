//! Whole runs of `run.sh` on bundles whose programs are shell scripts, and of the bundle's Python on a stand-in for torch.

mod bundle;
mod endings;
mod modes;
mod torch;
mod verdicts;
