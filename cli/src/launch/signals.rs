//! Signals of the launcher as events.

use super::process::Event;
use anyhow::Context;
use rustix::process::Signal;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::Sender;
use std::thread::Builder;

/// Signals that a terminal, a shell or a scheduler sends to end a program. Schedulers send SIGUSR1 as an early warning.
const FORWARDED: [Signal; 4] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::USR1];

/// Sends every later signal of these to `events`, instead of ending the launcher.
pub(super) fn forward(events: &Sender<Event>) -> anyhow::Result<()> {
    FORWARDED.into_iter().try_for_each(|signal| {
        let (mut arrived, handler) = UnixStream::pair().context("cannot make a pipe for signals")?;
        signal_hook::low_level::pipe::register(signal.as_raw(), handler)
            .with_context(|| format!("cannot handle signal {}", signal.as_raw()))?;
        let events = events.clone();
        let read = move || {
            let mut byte = [0];
            while arrived.read_exact(&mut byte).is_ok() && events.send(Event::Signal(signal)).is_ok() {}
        };
        Builder::new().name("signals".to_owned()).spawn(read).context("cannot start a thread")?;
        Ok(())
    })
}
