//! Ranks as threads that meet over real sockets, each test on its own address.

use meshstep_comm::rendezvous::{Environment, Error, Options, Store, Token};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

pub(crate) const HEX: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
/// Longer than any test should take.
pub(crate) const LONG: Duration = Duration::from_secs(20);

/// Returns a free loopback address: on Linux all of 127.0.0.0/8 is loopback, so no two tests share one.
pub(crate) fn free_addr() -> SocketAddr {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let (pid, next) = (std::process::id(), NEXT.fetch_add(1, Relaxed));
    let ip = match cfg!(target_os = "linux") {
        true => Ipv4Addr::new(127, 1 + (pid % 250) as u8, (pid / 250 % 250) as u8, 1 + (next % 250) as u8),
        false => Ipv4Addr::LOCALHOST,
    };
    TcpListener::bind((IpAddr::V4(ip), 0)).unwrap().local_addr().unwrap()
}

/// Returns the environment of rank `rank` of `world_size` with the token, for a store at `addr`.
pub(crate) fn environment(addr: SocketAddr, rank: usize, world_size: usize) -> Environment {
    Environment {
        rank,
        world_size,
        local_rank: rank,
        host: addr.ip().to_string(),
        port: addr.port(),
        run_id: "run".to_owned(),
        restart: 1,
        token: Some(Token::from_hex(HEX).unwrap()),
    }
}

pub(crate) fn options(deadline: Duration) -> Options {
    Options { deadline, handshake: Duration::from_millis(400), ..Options::default() }
}

/// Joins with each environment on its own thread, and returns the results in order.
pub(crate) fn meet<T: Send>(
    environments: &[Environment],
    options: &Options,
    body: impl Fn(Store) -> T + Sync,
) -> Vec<Result<T, Error>> {
    let body = &body;
    thread::scope(|scope| {
        let start = |environment| scope.spawn(move || Store::join(environment, options).map(body));
        let threads: Vec<_> = environments.iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Returns the environments of `world_size` ranks at a free address.
pub(crate) fn world(world_size: usize) -> Vec<Environment> {
    let addr = free_addr();
    (0..world_size).map(|rank| environment(addr, rank, world_size)).collect()
}
