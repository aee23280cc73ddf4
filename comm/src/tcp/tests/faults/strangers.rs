//! Strangers at the ranks' listeners and at the store: they are cut soon, and get no more than a refusal.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// Longest answer to a stranger: a refusal.
const REFUSAL: usize = 7;
/// Longest time for a stranger to be cut; machines of tests are slow.
const CUT: Duration = Duration::from_secs(5);

/// Opens `each` connections to every address; returns what was wrong.
pub(super) fn visit(addrs: &[SocketAddr], each: usize) -> Vec<String> {
    thread::scope(|scope| {
        let visit = |number: usize| scope.spawn(move || visit_one(addrs[number % addrs.len()], number));
        let visits: Vec<_> = (0..each * addrs.len()).map(visit).collect();
        visits.into_iter().filter_map(|visit| visit.join().unwrap().err()).collect()
    })
}

fn visit_one(addr: SocketAddr, number: usize) -> Result<(), String> {
    let Ok(mut socket) = TcpStream::connect(addr) else { return Ok(()) };
    let (begin, bytes) = (Instant::now(), bytes(number));
    socket.set_read_timeout(Some(2 * CUT)).unwrap();
    // The connection may be cut before.
    let _ = socket.write_all(&bytes);
    let mut answer = Vec::new();
    let end = socket.read_to_end(&mut answer);
    let (after, len) = (begin.elapsed(), answer.len());
    if after > CUT || len > REFUSAL {
        return Err(format!("a stranger with {} bytes got {len} after {after:?}: {end:?}", bytes.len()));
    }
    Ok(())
}

/// Bytes of a stranger: nothing, another protocol, half a greeting, a greeting without the token.
fn bytes(number: usize) -> Vec<u8> {
    let greeting = [&200u32.to_le_bytes()[..], b"mstp\x02\x05\x00store\x00\x00", &[7; 185]].concat();
    match number % 4 {
        0 => Vec::new(),
        1 => b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        2 => greeting[..30].to_vec(),
        _ => greeting,
    }
}
