//! Identity of the machine on which a process runs, and comparison with that of a peer.

/// Marks of a machine as a process sees it; empty where the system has none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Host {
    /// Random number of the machine's start.
    pub(super) boot: String,
    /// Namespace of the process's network.
    pub(super) network: String,
    /// Namespace of its shared memory.
    pub(super) ipc: String,
    /// Number that the job gives to the host.
    pub(super) id: Option<u64>,
}

impl Host {
    /// Reads the marks of this process, on a host with the job's number `id`.
    pub(super) fn read(id: Option<u64>) -> Self {
        let link = |name: &str| std::fs::read_link(format!("/proc/self/ns/{name}")).ok();
        let text =
            |name: &str| link(name).map(|path| path.to_string_lossy().into_owned()).unwrap_or_default();
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Host { boot: boot.trim().to_owned(), network: text("net"), ipc: text("ipc"), id }
    }
}

/// True if two processes run on one machine and bytes between them do not leave it. `local` says if the peer's address is one of
/// this process's own network: copies of a virtual machine may have equal marks, but not the same address.
pub(super) fn same_host(a: &Host, b: &Host, local: bool) -> bool {
    let known = !a.boot.is_empty() && !a.network.is_empty() && !a.ipc.is_empty();
    known && local && a == b
}

/// True if `ip` is an address of this process's network: the system lets a socket have it.
pub(super) fn is_local(ip: std::net::IpAddr) -> bool {
    std::net::UdpSocket::bind((ip, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(boot: &str, network: &str, ipc: &str) -> Host {
        Host { boot: boot.to_owned(), network: network.to_owned(), ipc: ipc.to_owned(), id: Some(7) }
    }

    #[test]
    fn only_equal_and_known_marks_at_a_local_address_are_one_host() {
        let here = host("b", "n", "i");
        assert!(same_host(&here, &here.clone(), true));
        assert!(!same_host(&here, &here.clone(), false));
        let numbered = |id| Host { id, ..here.clone() };
        for other in
            [host("c", "n", "i"), host("b", "m", "i"), host("b", "n", "j"), numbered(Some(8)), numbered(None)]
        {
            assert!(!same_host(&here, &other, true), "{other:?}");
        }
        for unknown in [host("", "n", "i"), host("b", "", "i"), host("b", "n", "")] {
            assert!(!same_host(&unknown, &unknown.clone(), true), "{unknown:?}");
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_is_on_its_own_host() {
        let host = Host::read(None);
        assert!(same_host(&host, &Host::read(None), is_local("127.0.0.1".parse().unwrap())));
        // An address for documentation, which no machine has.
        assert!(!is_local("192.0.2.1".parse().unwrap()));
    }
}
