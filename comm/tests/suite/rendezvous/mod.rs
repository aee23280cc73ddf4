//! Processes that find each other: from which variables, over which bytes, and past whom.

mod channel;
mod common;
mod disagreement;
mod environment;
mod meeting;
mod processes;
mod proxy;
mod strangers;
mod wire;
