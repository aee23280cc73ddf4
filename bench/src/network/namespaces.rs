//! Network namespaces of this machine, joined by a bridge, each behind a link of a limited rate.
//!
//! ```text
//! namespace i: veth 10.x.y.(i+1) --- tbf --- veth --- bridge
//! ```
//!
//! A token bucket limits both directions of each link. It is the kernel's; the delay of a real network is not simulated.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{self, Command};

use anyhow::{Context as _, Result, ensure};

/// Longest time that a packet waits for its turn on a link; later ones are dropped, and TCP sends them again.
const QUEUE: &str = "50ms";

/// Bytes of a token bucket: the longest burst. Below one of the kernel's 64 KiB segments a link would pass nothing.
fn burst(bits: u64) -> u64 {
    // Tokens of 2 ms, because the kernel's timer may be that late.
    (bits / 8 / 500).max(128 << 10)
}

/// Fails if this machine makes no namespaces, or no links of a limited rate.
pub(crate) fn probe() -> Result<()> {
    Namespaces::new(1, 1_000_000_000).map(drop)
}

/// Namespaces that are deleted, with their links, when this is dropped.
#[derive(Debug)]
pub(crate) struct Namespaces {
    /// Prefix of all names, at most 9 bytes: names of links have at most 15.
    prefix: String,
    /// Second and third byte of the addresses.
    subnet: [u8; 2],
    count: usize,
}

impl Namespaces {
    /// Makes `count` namespaces behind links of `bits` bits per second. It needs root and the programs `ip` and `tc`.
    pub(crate) fn new(count: usize, bits: u64) -> Result<Self> {
        ensure!((1..=200).contains(&count), "{count} namespaces; make 1 to 200");
        let namespaces = Self::of(process::id(), count);
        sweep()
            .and_then(|()| namespaces.make(bits))
            .context("this machine makes no network namespaces; run as root with iproute2")?;
        Ok(namespaces)
    }

    /// Returns the names and addresses that a process uses.
    fn of(id: u32, count: usize) -> Self {
        let [_, _, third, fourth] = id.to_be_bytes();
        Namespaces { prefix: format!("{PREFIX}{id:x}"), subnet: [third | 0x80, fourth], count }
    }

    fn make(&self, bits: u64) -> Result<()> {
        let bridge = self.bridge();
        ip(&["link", "add", &bridge, "type", "bridge"])?;
        ip(&["link", "set", &bridge, "up"])?;
        (0..self.count).try_for_each(|i| self.join(i, bits))
    }

    /// Makes namespace `i` and its link.
    fn join(&self, i: usize, bits: u64) -> Result<()> {
        let (name, outside, address) = (self.name(i), self.outside(i), self.address(i));
        ip(&["netns", "add", &name])?;
        ip(&["link", "add", &outside, "type", "veth", "peer", "name", LINK, "netns", &name])?;
        ip(&["link", "set", &outside, "master", &self.bridge(), "up"])?;
        ip(&["-n", &name, "addr", "add", &format!("{address}/24"), "dev", LINK])?;
        ip(&["-n", &name, "link", "set", LINK, "up"])?;
        ip(&["-n", &name, "link", "set", "lo", "up"])?;
        limit(&["-n", &name], LINK, bits)?;
        limit(&[], &outside, bits)
    }

    /// Returns the number of namespaces.
    pub(crate) fn len(&self) -> usize {
        self.count
    }

    /// Returns the address of namespace `i`.
    pub(crate) fn address(&self, i: usize) -> Ipv4Addr {
        let [second, third] = self.subnet;
        Ipv4Addr::new(10, second, third, u8::try_from(i + 1).unwrap_or(u8::MAX))
    }

    /// Returns a command that runs `program` in namespace `i`.
    pub(crate) fn command(&self, i: usize, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name(i)]).arg(program);
        command
    }

    /// Returns the bytes that namespace `i` has sent over its link so far.
    pub(crate) fn sent(&self, i: usize) -> Result<u64> {
        let statistics = format!("/sys/class/net/{LINK}/statistics/tx_bytes");
        let mut command = self.command(i, Path::new("cat"));
        let text = output(command.arg(statistics))?;
        text.trim().parse().with_context(|| format!("{text} is no number of bytes"))
    }

    fn name(&self, i: usize) -> String {
        format!("{}n{i}", self.prefix)
    }

    /// Returns the name of the link's end at the bridge.
    fn outside(&self, i: usize) -> String {
        format!("{}l{i}", self.prefix)
    }

    fn bridge(&self) -> String {
        format!("{}b", self.prefix)
    }
}

/// Name of a link inside its namespace.
const LINK: &str = "eth0";

/// Beginning of all names.
const PREFIX: &str = "ms";

/// Deletes the namespaces of processes that were killed.
fn sweep() -> Result<()> {
    for line in output(Command::new("ip").args(["netns", "list"]))?.lines() {
        let name = line.split_whitespace().next().unwrap_or_default();
        let Some(id) = owner(name).filter(|id| !Path::new("/proc").join(id.to_string()).exists()) else {
            continue;
        };
        // Another program may delete them at the same time, and the bridge goes with the first namespace.
        let _ = ip(&["netns", "del", name]);
        drop(Namespaces::of(id, 0));
    }
    Ok(())
}

/// Returns the process that made the namespace with this name.
fn owner(name: &str) -> Option<u32> {
    let (id, index) = name.strip_prefix(PREFIX)?.split_once('n')?;
    index.parse::<usize>().ok()?;
    u32::from_str_radix(id, 16).ok()
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        // What was not made cannot be deleted, which is no fault. A namespace would take its link with it, but later.
        for i in 0..self.count {
            let _ = ip(&["link", "del", &self.outside(i)]);
            let _ = ip(&["netns", "del", &self.name(i)]);
        }
        let _ = ip(&["link", "del", &self.bridge()]);
    }
}

/// Limits what leaves through a link.
fn limit(namespace: &[&str], link: &str, bits: u64) -> Result<()> {
    let (rate, burst) = (format!("{bits}bit"), burst(bits).to_string());
    let settings = ["tbf", "rate", &rate, "burst", &burst, "latency", QUEUE];
    output(Command::new("tc").args(namespace).args(["qdisc", "add", "dev", link, "root"]).args(settings))?;
    Ok(())
}

fn ip(args: &[&str]) -> Result<()> {
    output(Command::new("ip").args(args)).map(drop)
}

/// Returns what a command prints; an error with its complaint if it fails.
fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}", complaint.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    /// Sends 4 MiB from namespace 1 to namespace 0 and returns the seconds.
    fn send(namespaces: &Namespaces) -> f64 {
        let python = Path::new("python3");
        let address = namespaces.address(0);
        let mut listen = namespaces.command(0, python);
        let listen = listen.args(["-c", LISTEN, &address.to_string()]).stdout(process::Stdio::piped());
        let mut listener = listen.spawn().unwrap();
        let mut ready = [0; 6];
        std::io::Read::read_exact(listener.stdout.as_mut().unwrap(), &mut ready).unwrap();
        let start = Instant::now();
        output(namespaces.command(1, python).args(["-c", SEND, &address.to_string()])).unwrap();
        assert!(listener.wait().unwrap().success());
        start.elapsed().as_secs_f64()
    }

    const LISTEN: &str = "
import socket, sys
s = socket.create_server((sys.argv[1], 7))
print('ready', flush=True)
c, left = s.accept()[0], 4 << 20
while left: left -= len(c.recv(min(left, 1 << 16)))
c.send(b'x')";
    const SEND: &str = "
import socket, sys
c = socket.create_connection((sys.argv[1], 7))
c.sendall(bytes(4 << 20)); c.recv(1)";

    #[test]
    fn a_link_has_the_rate_that_is_asked_for() {
        let namespaces = match Namespaces::new(2, 100_000_000) {
            Ok(namespaces) => namespaces,
            Err(why) => return println!("skipped: {why:#}"),
        };
        let before = namespaces.sent(1).unwrap();
        let seconds = send(&namespaces);
        // 4 MiB at 100 Mbit/s take 0.34 s.
        assert!((0.3..3.0).contains(&seconds), "{seconds} s");
        let sent = namespaces.sent(1).unwrap() - before;
        assert!((4 << 20..5 << 20).contains(&sent), "{sent} bytes");
        let (name, bridge) = (namespaces.name(0), namespaces.bridge());
        drop(namespaces);
        assert!(!output(Command::new("ip").args(["netns", "list"])).unwrap().contains(&name));
        assert!(!output(Command::new("ip").args(["link"])).unwrap().contains(&bridge));
    }

    #[test]
    fn namespaces_of_a_process_that_is_gone_are_deleted() {
        let mut gone = Command::new("true").spawn().unwrap();
        gone.wait().unwrap();
        let left = Namespaces::of(gone.id(), 1);
        if let Err(why) = left.make(1_000_000) {
            return println!("skipped: {why:#}");
        }
        let (name, bridge) = (left.name(0), left.bridge());
        sweep().unwrap();
        assert!(!output(Command::new("ip").args(["netns", "list"])).unwrap().contains(&name));
        assert!(!output(Command::new("ip").args(["link"])).unwrap().contains(&bridge));
    }

    #[test]
    fn only_names_of_this_program_have_an_owner() {
        assert_eq!(owner(&Namespaces::of(4_194_303, 0).name(7)), Some(4_194_303));
        for other in ["", "ms", "ms12", "ms12nx", "msxyn1", "blue"] {
            assert_eq!(owner(other), None, "{other}");
        }
    }

    #[test]
    fn bursts_are_longer_than_a_segment_and_follow_the_rate() {
        assert_eq!((burst(1_000_000), burst(10_000_000_000)), (128 << 10, 2_500_000));
    }
}
