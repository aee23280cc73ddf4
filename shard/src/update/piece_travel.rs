//! Pieces of one buffer in flight between pairs of ranks.

use crate::error::Error;
use crate::plan::matrix_exchange::Message;
use crate::ranks::host_words;
use meshstep_comm::{Communicator, InFlight, Op};
use meshstep_tensor::{Buffer, Queue};

/// Parts of a buffer that travel, and those between them. Its vectors are kept from step to step, so that steps allocate nothing.
#[derive(Debug, Default)]
pub(crate) struct PieceTravel {
    messages: Vec<Buffer>,
    /// The buffer before each message, and after the last.
    rest: Vec<Buffer>,
    flights: Vec<(usize, StartedPiece)>,
}

type StartedPiece = Result<InFlight, (Buffer, meshstep_comm::Error)>;

impl PieceTravel {
    /// Makes room for so many messages at once.
    pub(crate) fn with_room(messages: usize) -> Self {
        PieceTravel {
            messages: Vec::with_capacity(messages),
            rest: Vec::with_capacity(messages + 1),
            flights: Vec::with_capacity(messages),
        }
    }

    /// Starts the messages in `order`; `sends` returns true for a message from this rank, false for a message to it, and `None` for a
    /// message that does not travel. The buffer is away until [`land`](Self::land), which returns the errors of starts too.
    pub(crate) fn start(
        &mut self,
        (comm, queue): (&dyn Communicator, &Queue),
        buffer: &mut Buffer,
        (messages, order): (&[Message], &[usize]),
        sends: impl Fn(&Message) -> Option<bool>,
    ) -> Result<(), Error> {
        let (mut rest, mut at) = (buffer.take(), 0);
        for Message { place, .. } in messages {
            let mut message = rest.split_off(place.start - at)?;
            let after = message.split_off(place.len())?;
            self.messages.push(message);
            self.rest.push(std::mem::replace(&mut rest, after));
            at = place.end;
        }
        self.rest.push(rest);
        let mut failed = None;
        for &m in order {
            let peer = messages[m].peer;
            let Some(sends) = sends(&messages[m]) else { continue };
            let op = if sends { Op::send(peer) } else { Op::recv(peer) };
            let part = self.messages[m].take();
            let started = match &failed {
                None => comm.start(op, part, queue),
                // The other ranks' call must not meet this rank's next one.
                Some(error) => Err((part, meshstep_comm::Error::clone(error))),
            };
            failed = started.as_ref().err().map(|(_, error)| error.clone());
            self.flights.push((m, started));
        }
        Ok(())
    }

    /// Waits for all messages, and puts the buffer together again.
    pub(crate) fn land(&mut self, queue: &Queue, buffer: &mut Buffer) -> Result<(), Error> {
        let mut landed = Ok(());
        for (m, started) in self.flights.drain(..) {
            let (part, arrived) = host_words::land(started, queue);
            self.messages[m] = part;
            landed = landed.and(arrived);
        }
        let join = |whole: Buffer, next| {
            whole.join(next).unwrap_or_else(|_| unreachable!("parts land in the order they were cut"))
        };
        let mut rest = self.rest.drain(..);
        let mut whole = rest.next().unwrap_or_else(|| buffer.take());
        for (message, rest) in self.messages.drain(..).zip(rest) {
            whole = join(join(whole, message), rest);
        }
        *buffer = whole;
        Ok(landed?)
    }
}
