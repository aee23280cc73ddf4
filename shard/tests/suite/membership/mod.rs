//! Workers that come, go, stand still and die, and an arbiter that does too.

mod chaos;
mod common;
mod in_process;
mod log;
mod machines;
mod messages;
mod processes;
mod remote;
mod simulated;
mod trained;
mod training;
mod wired;
