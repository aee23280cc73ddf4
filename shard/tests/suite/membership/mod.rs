//! Workers that join, leave, stall and die, and an arbiter that stalls and dies too.

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
