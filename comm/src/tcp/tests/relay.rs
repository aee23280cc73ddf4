//! Relay between two ranks, which damages the bytes of one direction.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

/// Damage to a direction, from byte `at` of its records on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Damage {
    pub(super) at: usize,
    pub(super) kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One bit of a byte changes.
    Flip(u8),
    /// Bytes are left out.
    Drop(usize),
    /// Bytes come twice.
    Repeat(usize),
    /// Bytes of nobody come in between.
    Garbage(usize),
    /// The whole connection ends.
    Cut,
    /// This direction ends, the other goes on.
    HalfClose,
    /// The rest comes later, and byte by byte for a while.
    Delay(Duration),
}

/// Listens on a loopback address and relays one connection to `to`. `damaged` is true for the direction from the caller.
pub(super) fn start(to: SocketAddr, from_caller: bool, damage: Damage) -> SocketAddr {
    let listener = TcpListener::bind((to.ip(), 0)).unwrap();
    let addr = listener.local_addr().unwrap();
    // The thread ends with the connection, or with the test's process.
    thread::spawn(move || {
        let (caller, _) = listener.accept().unwrap();
        let callee = TcpStream::connect(to).unwrap();
        let ends = |from: &TcpStream, to: &TcpStream| (from.try_clone().unwrap(), to.try_clone().unwrap());
        let (there, back) = (ends(&caller, &callee), ends(&callee, &caller));
        // Frames of the handshake: a greeting, its confirmation and the first message; the answer.
        let damage_of = move |caller: bool| (from_caller == caller).then_some(damage);
        let first = thread::spawn(move || pump(there.0, there.1, 3, damage_of(true)));
        pump(back.0, back.1, 1, damage_of(false));
        first.join().unwrap();
    });
    addr
}

fn pump(mut from: TcpStream, mut to: TcpStream, frames: usize, damage: Option<Damage>) {
    for _ in 0..frames {
        if pass_frame(&mut from, &mut to).is_none() {
            return;
        }
    }
    let (mut passed, mut damage, mut buffer) = (0, damage, vec![0; 64 << 10]);
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        let mut bytes = buffer[..len].to_vec();
        if let Some(now) = damage.filter(|damage| damage.at < passed + len) {
            damage = None;
            let Some(changed) = apply(now, bytes, now.at - passed, &from, &mut to) else { return };
            bytes = changed;
        }
        passed += len;
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

fn pass_frame(from: &mut TcpStream, to: &mut TcpStream) -> Option<()> {
    let mut len = [0; 4];
    from.read_exact(&mut len).ok()?;
    let mut frame = vec![0; u32::from_le_bytes(len) as usize];
    from.read_exact(&mut frame).ok()?;
    to.write_all(&[&len[..], &frame].concat()).ok()
}

/// Damages bytes that were read; `None` at the end of the direction.
fn apply(
    damage: Damage,
    mut bytes: Vec<u8>,
    at: usize,
    from: &TcpStream,
    to: &mut TcpStream,
) -> Option<Vec<u8>> {
    let end = |len: usize| (at + len).min(bytes.len());
    match damage.kind {
        Kind::Flip(bit) => bytes[at] ^= 1 << bit,
        Kind::Drop(len) => drop(bytes.drain(at..end(len))),
        Kind::Repeat(len) => {
            let again = bytes[at..end(len)].to_vec();
            bytes.splice(at..at, again);
        }
        Kind::Garbage(len) => drop(bytes.splice(at..at, (0..len).map(|i| (i * 37) as u8))),
        Kind::Cut | Kind::HalfClose => {
            let _ = to.write_all(&bytes[..at]);
            let _ = to.shutdown(if damage.kind == Kind::Cut { Shutdown::Both } else { Shutdown::Write });
            if damage.kind == Kind::Cut {
                let _ = from.shutdown(Shutdown::Both);
            }
            return None;
        }
        Kind::Delay(pause) => {
            thread::sleep(pause);
            let slow = bytes.len().min(40);
            for byte in bytes.drain(..slow) {
                to.write_all(&[byte]).ok()?;
                thread::sleep(Duration::from_micros(200));
            }
        }
    }
    Some(bytes)
}
