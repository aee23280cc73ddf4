//! Tests of the book: its programs and its links.

mod quick_start;
