//! Choice of the address on which a rank listens.

use super::error::Error;
use super::options::Address;
use std::net::{IpAddr, SocketAddr, UdpSocket};

/// Variable with the name of an interface or an address.
pub(super) const VARIABLE: &str = "MESHSTEP_IFACE";

/// Returns the address of the option, else that of the variable, else the address by which this machine reaches `store`.
pub(super) fn choose(
    option: Option<&Address>,
    variable: Option<&str>,
    store: SocketAddr,
) -> Result<IpAddr, Error> {
    let variable = variable.map(str::trim).filter(|text| !text.is_empty()).map(Address::parse);
    match option.or(variable.as_ref()) {
        Some(Address::Ip(ip)) => Ok(*ip),
        Some(Address::Interface(name)) => of_interface(name),
        None => towards(store),
    }
}

/// Returns the address from which the system would send to `store`; nothing is sent.
fn towards(store: SocketAddr) -> Result<IpAddr, Error> {
    let any: IpAddr = match store {
        SocketAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let route = || {
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(store)?;
        socket.local_addr()
    };
    route().map(|addr| addr.ip()).map_err(Error::system("finding the address towards the store"))
}

/// Returns the first address of an interface, IPv4 before IPv6.
fn of_interface(name: &str) -> Result<IpAddr, Error> {
    let known = interfaces();
    let Some(index) = known.iter().find_map(|(known, index)| (known == name).then_some(*index)) else {
        let known = known.into_iter().map(|(known, _)| known).collect();
        return Err(Error::NoInterface { name: name.to_owned(), known });
    };
    let mut addresses: Vec<(u32, IpAddr)> =
        netlink::addresses().map_err(Error::system("listing addresses"))?;
    addresses.retain(|(of, ip)| *of == index && !is_link_local(ip));
    addresses.sort_by_key(|(_, ip)| ip.is_ipv6());
    let first = addresses.first().map(|(_, ip)| *ip);
    first.ok_or_else(|| Error::NoAddress { name: name.to_owned() })
}

/// An address that is valid on one link only; its scope is a number of this machine alone.
fn is_link_local(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(_) => false,
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    }
}

/// Returns the names and numbers of the machine's interfaces.
fn interfaces() -> Vec<(String, u32)> {
    let entries = std::fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    let interface = |entry: std::fs::DirEntry| {
        let index = std::fs::read_to_string(entry.path().join("ifindex")).ok()?;
        Some((entry.file_name().to_string_lossy().into_owned(), index.trim().parse().ok()?))
    };
    let mut interfaces: Vec<_> = entries.filter_map(interface).collect();
    interfaces.sort();
    interfaces
}

#[cfg(target_os = "linux")]
mod netlink {
    //! Addresses of all interfaces, by the kernel's route socket.

    use rustix::net::netlink::SocketAddrNetlink;
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
    use std::net::IpAddr;

    /// Kernel's numbers: requests and answers, and their parts.
    const GET_ADDRESS: u16 = 22;
    const NEW_ADDRESS: u16 = 20;
    const DONE: u16 = 3;
    const ERROR: u16 = 2;
    const REQUEST_DUMP: u16 = 0x301;
    const ADDRESS: u16 = 1;
    const LOCAL: u16 = 2;
    /// Bytes of a message's header, and of an address's fixed part.
    const HEADER: usize = 16;
    const FIXED: usize = 8;

    /// Returns the number of the interface and the address, for each address of this machine.
    pub(super) fn addresses() -> std::io::Result<Vec<(u32, IpAddr)>> {
        // Protocol 0 of this family is the one for routes.
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        let mut request = Vec::from(((HEADER + FIXED) as u32).to_ne_bytes());
        request.extend(GET_ADDRESS.to_ne_bytes());
        request.extend(REQUEST_DUMP.to_ne_bytes());
        request.resize(HEADER + FIXED, 0);
        rustix::net::sendto(&socket, &request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
        let (mut found, mut answer) = (Vec::new(), vec![0; 64 << 10]);
        loop {
            let (len, _) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty())?;
            if len == 0 || !parse(&answer[..len], &mut found) {
                return Ok(found);
            }
        }
    }

    /// Adds the addresses of one answer; returns false after the last one.
    fn parse(mut answer: &[u8], found: &mut Vec<(u32, IpAddr)>) -> bool {
        while let Some((len, kind)) = answer.first_chunk::<6>().map(|bytes| (word(bytes), half(&bytes[4..])))
        {
            let Some(message) = answer.get(HEADER..len as usize) else { return false };
            match kind {
                DONE | ERROR => return false,
                NEW_ADDRESS => found.extend(address(message)),
                _ => {}
            }
            answer = answer.get((len as usize).next_multiple_of(4)..).unwrap_or_default();
        }
        true
    }

    /// Reads one address: the local one, where a link has two ends.
    fn address(message: &[u8]) -> Option<(u32, IpAddr)> {
        let (fixed, mut rest) = message.split_at_checked(FIXED)?;
        let mut address = None;
        while rest.len() >= 4 {
            let (len, kind) = (half(rest) as usize, half(&rest[2..]));
            let value = rest.get(4..len)?;
            if kind == LOCAL || (kind == ADDRESS && address.is_none()) {
                address = ip(value);
            }
            rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        }
        Some((word(&fixed[4..]), address?))
    }

    fn ip(bytes: &[u8]) -> Option<IpAddr> {
        let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
        v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
    }

    fn word(bytes: &[u8]) -> u32 {
        bytes.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes))
    }

    fn half(bytes: &[u8]) -> u16 {
        bytes.first_chunk().map_or(0, |bytes| u16::from_ne_bytes(*bytes))
    }
}

#[cfg(not(target_os = "linux"))]
mod netlink {
    //! Refusal on systems other than Linux, where interfaces are not listed.

    pub(super) fn addresses() -> std::io::Result<Vec<(u32, std::net::IpAddr)>> {
        Err(std::io::Error::other("interfaces are known on Linux only; set MESHSTEP_IFACE to an address"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    const STORE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9);

    #[test]
    fn the_option_comes_before_the_variable_and_the_route_to_the_store() {
        let option = Address::Ip("10.1.2.3".parse().unwrap());
        let chosen = [
            choose(Some(&option), Some("10.9.9.9"), STORE),
            choose(None, Some(" ::1 "), STORE),
            choose(None, Some("  "), STORE),
            choose(None, None, SocketAddr::new(Ipv6Addr::LOCALHOST.into(), 9)),
        ];
        let expected: Vec<IpAddr> =
            ["10.1.2.3", "::1", "127.0.0.1", "::1"].iter().map(|ip| ip.parse().unwrap()).collect();
        assert_eq!(chosen.map(Result::unwrap).to_vec(), expected);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn an_interface_gives_its_address_and_an_unknown_one_the_known_names() {
        assert_eq!(choose(None, Some("lo"), STORE), Ok(Ipv4Addr::LOCALHOST.into()));
        match choose(None, Some("no-such0"), STORE) {
            Err(Error::NoInterface { name, known }) => {
                assert!(name == "no-such0" && known.contains(&"lo".to_owned()), "{known:?}");
            }
            other => panic!("{other:?}"),
        }
    }
}
