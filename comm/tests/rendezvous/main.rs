//! Processes that find each other: from which variables, over which bytes, and past whom.

mod environment;
