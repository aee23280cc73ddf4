//! Relays between ranks: one for each pair. It damages the pair's connections by the schedule until it is healed.

use super::schedule::{WireFault, WireKind};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering::SeqCst};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Interval at which a relay looks for its end.
const TICK: Duration = Duration::from_millis(20);
/// States of a connection.
const OPEN: u8 = 0;
const ENDED: u8 = 1;
const FROZEN: u8 = 2;

/// State of all relays of a schedule.
#[derive(Debug)]
struct Control {
    /// Address of each rank's own listener, once its card is known.
    targets: Vec<OnceLock<SocketAddr>>,
    faults: Vec<WireFault>,
    healed: AtomicBool,
    stopped: AtomicBool,
}

/// The relays of a schedule, which end when this is dropped.
#[derive(Debug)]
pub(super) struct Wires {
    control: Arc<Control>,
    relays: Vec<((usize, usize), SocketAddr, JoinHandle<()>)>,
}

impl Wires {
    /// Starts a relay for each pair of `n` ranks.
    pub(super) fn start(n: usize, faults: Vec<WireFault>) -> Self {
        let targets = (0..n).map(|_| OnceLock::new()).collect();
        let (healed, stopped) = (AtomicBool::new(false), AtomicBool::new(false));
        let control = Arc::new(Control { targets, faults, healed, stopped });
        let pairs = (0..n).flat_map(|to| (0..to).map(move |from| (from, to)));
        let relay = |pair| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            let (addr, control) = (listener.local_addr().unwrap(), Arc::clone(&control));
            (pair, addr, thread::spawn(move || relay(&listener, pair, &control)))
        };
        let relays = pairs.map(relay).collect();
        Wires { control, relays }
    }

    /// Returns the address by which the first rank of the pair calls the second one, which listens at `target`.
    pub(super) fn addr(&self, pair: (usize, usize), target: SocketAddr) -> SocketAddr {
        self.control.targets[pair.1].get_or_init(|| target);
        self.relays.iter().find(|(of, ..)| *of == pair).unwrap().1
    }

    /// Ends the damage of connections that begin from now on, and of those that are still whole.
    pub(super) fn heal(&self) {
        self.control.healed.store(true, SeqCst);
    }
}

impl Drop for Wires {
    fn drop(&mut self) {
        self.control.stopped.store(true, SeqCst);
        for (_, addr, thread) in self.relays.drain(..) {
            // The connection ends the wait for one.
            drop(TcpStream::connect(addr));
            thread.join().unwrap();
        }
    }
}

fn relay(listener: &TcpListener, pair: (usize, usize), control: &Arc<Control>) {
    for number in 0.. {
        let Ok((caller, _)) = listener.accept() else { return };
        if control.stopped.load(SeqCst) {
            return;
        }
        // A caller of an earlier schedule may call the port that was a relay's before.
        let Some(target) = control.targets[pair.1].get() else { continue };
        // Without a listener the caller loses its connection too.
        let Ok(callee) = TcpStream::connect(target) else { continue };
        let state = Arc::new(AtomicU8::new(OPEN));
        let sockets = [Arc::new(caller), Arc::new(callee)];
        for from_caller in [true, false] {
            let fits = |fault: &&WireFault| {
                (fault.pair, fault.connection, fault.from_caller) == (pair, number, from_caller)
            };
            let fault = control.faults.iter().find(fits).copied();
            let [caller, callee] = sockets.each_ref().map(Arc::clone);
            let (from, to) = if from_caller { (caller, callee) } else { (callee, caller) };
            let (control, state) = (Arc::clone(control), Arc::clone(&state));
            // The threads end with the connection, or with the relays.
            thread::spawn(move || Pump { from, to, fault, control, state, passed: 0 }.run());
        }
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// Alters bytes at their beginning.
fn altered(kind: WireKind, mut bytes: Vec<u8>) -> Vec<u8> {
    match kind {
        WireKind::Flip(bit) => bytes[0] ^= 1 << bit,
        WireKind::Drop(len) => drop(bytes.drain(..len.min(bytes.len()))),
        WireKind::Repeat(len) => {
            let again = bytes[..len.min(bytes.len())].to_vec();
            bytes.splice(0..0, again);
        }
        WireKind::Garbage(len) => drop(bytes.splice(0..0, (0..len).map(|i| (i * 37) as u8))),
        _ => {}
    }
    bytes
}

/// One direction of a connection.
struct Pump {
    from: Arc<TcpStream>,
    to: Arc<TcpStream>,
    fault: Option<WireFault>,
    control: Arc<Control>,
    /// State of the whole connection.
    state: Arc<AtomicU8>,
    passed: usize,
}

impl Pump {
    fn run(mut self) {
        let mut buffer = vec![0; 64 << 10];
        self.from.set_nodelay(true).unwrap();
        self.from.set_read_timeout(Some(TICK)).unwrap();
        while self.is_open() {
            match (&*self.from).read(&mut buffer) {
                Err(error) if is_timeout(&error) => {}
                Ok(len @ 1..) => {
                    if self.pass(&buffer[..len]).is_none() {
                        break;
                    }
                }
                Ok(0) | Err(_) => {
                    let _ = self.to.shutdown(Shutdown::Write);
                    return;
                }
            }
        }
        // A connection that stands still stays open.
        while self.state.load(SeqCst) == FROZEN && !self.control.stopped.load(SeqCst) {
            thread::sleep(TICK);
        }
    }

    /// Passes bytes on; `None` at the end of the direction.
    fn pass(&mut self, bytes: &[u8]) -> Option<()> {
        let begin = self.passed;
        self.passed += bytes.len();
        let due = |fault: &WireFault| fault.at < begin + bytes.len() && !self.control.healed.load(SeqCst);
        let Some(fault) = self.fault.filter(due) else { return (&*self.to).write_all(bytes).ok() };
        self.fault = None;
        let (before, after) = bytes.split_at(fault.at.saturating_sub(begin));
        (&*self.to).write_all(before).ok()?;
        self.damage(fault.kind, after)
    }

    /// Passes the bytes from the fault on; `None` at the end of the direction.
    fn damage(&self, kind: WireKind, bytes: &[u8]) -> Option<()> {
        let mut to = &*self.to;
        match kind {
            WireKind::Cut | WireKind::Reset => self.end(matches!(kind, WireKind::Reset)),
            WireKind::HalfClose => {
                let _ = to.shutdown(Shutdown::Write);
                self.swallow()
            }
            WireKind::Swallow => self.swallow(),
            WireKind::Freeze => {
                self.state.store(FROZEN, SeqCst);
                None
            }
            WireKind::Delay(pause) => {
                thread::sleep(pause);
                to.write_all(bytes).ok()
            }
            WireKind::Trickle => self.trickle(bytes),
            kind => to.write_all(&altered(kind, bytes.to_vec())).ok(),
        }
    }

    /// Ends both directions.
    fn end(&self, by_reset: bool) -> Option<()> {
        for socket in [&self.from, &self.to] {
            if by_reset {
                // The kernel resets the connection when the other direction has dropped the socket too.
                let _ = rustix::net::sockopt::set_socket_linger(&**socket, Some(Duration::ZERO));
            } else {
                let _ = socket.shutdown(Shutdown::Both);
            }
        }
        self.state.store(ENDED, SeqCst);
        None
    }

    /// Reads what comes, and passes nothing on.
    fn swallow(&self) -> Option<()> {
        let mut buffer = vec![0; 64 << 10];
        while self.is_open() {
            match (&*self.from).read(&mut buffer) {
                Err(error) if is_timeout(&error) => {}
                Ok(1..) => {}
                Ok(0) | Err(_) => break,
            }
        }
        None
    }

    /// Passes a byte in each millisecond, those that are here and those that come.
    fn trickle(&self, bytes: &[u8]) -> Option<()> {
        let mut next = bytes.to_vec();
        while self.is_open() {
            for byte in next.drain(..) {
                (&*self.to).write_all(&[byte]).ok()?;
                thread::sleep(Duration::from_millis(1));
                if !self.is_open() {
                    return None;
                }
            }
            next.resize(1, 0);
            match (&*self.from).read(&mut next) {
                Err(error) if is_timeout(&error) => next.clear(),
                Ok(1..) => {}
                Ok(0) | Err(_) => return None,
            }
        }
        None
    }

    fn is_open(&self) -> bool {
        self.state.load(SeqCst) == OPEN && !self.control.stopped.load(SeqCst)
    }
}
