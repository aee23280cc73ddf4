//! Man in the middle: forwards frames between ranks and their store, records them, and changes them on request.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum To {
    Store,
    Rank,
}

/// Frames to forward in place of a frame, from its direction and its number from 0 on its connection.
type Change = dyn Fn(To, usize, Vec<u8>) -> Vec<Vec<u8>> + Send + Sync;

pub(crate) struct Proxy {
    recorded: Arc<Recording>,
}

type Recording = Mutex<Vec<(To, Vec<u8>)>>;

impl Proxy {
    /// Forwards all traffic to `store`.
    pub(crate) fn honest(addr: SocketAddr, store: SocketAddr) -> Self {
        Self::new(addr, store, |_, _, frame| vec![frame])
    }

    pub(crate) fn new(
        addr: SocketAddr,
        store: SocketAddr,
        change: impl Fn(To, usize, Vec<u8>) -> Vec<Vec<u8>> + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(addr).unwrap();
        let (recorded, change): (Arc<Recording>, Arc<Change>) = (Arc::default(), Arc::new(change));
        let proxy = Proxy { recorded: Arc::clone(&recorded) };
        // The thread ends with the test's process.
        thread::spawn(move || {
            for rank in listener.incoming().map(Result::unwrap) {
                // The rank tries again.
                let Ok(store) = TcpStream::connect(store) else { continue };
                for to in [To::Store, To::Rank] {
                    let (rank, store) = (rank.try_clone().unwrap(), store.try_clone().unwrap());
                    let (recorded, change) = (Arc::clone(&recorded), Arc::clone(&change));
                    let (from, into) = if to == To::Store { (rank, store) } else { (store, rank) };
                    thread::spawn(move || pump(to, from, into, &recorded, &*change));
                }
            }
        });
        proxy
    }

    /// Returns the bytes recorded in one direction, on all connections.
    pub(crate) fn recorded(&self, to: To) -> Vec<u8> {
        let recorded = self.recorded.lock().unwrap();
        recorded.iter().filter(|(way, _)| *way == to).flat_map(|(_, frame)| frame.clone()).collect()
    }
}

fn pump(to: To, mut from: TcpStream, mut into: TcpStream, recorded: &Recording, change: &Change) {
    for number in 0.. {
        let Some(frame) = read_frame(&mut from) else { break };
        recorded.lock().unwrap().push((to, frame.clone()));
        let changed = change(to, number, frame);
        if changed.iter().any(|frame| into.write_all(frame).is_err()) {
            break;
        }
    }
    let _ = into.shutdown(Shutdown::Write);
}

/// Reads a whole frame, including its length.
pub(crate) fn read_frame(from: &mut TcpStream) -> Option<Vec<u8>> {
    let mut frame = vec![0; 4];
    from.read_exact(&mut frame).ok()?;
    let len = u32::from_le_bytes([frame[0], frame[1], frame[2], frame[3]]) as usize;
    frame.resize(4 + len, 0);
    from.read_exact(&mut frame[4..]).ok()?;
    Some(frame)
}
