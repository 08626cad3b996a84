//! Common parts of all fan-outs, whose BPF programs send copies of a packet to many receivers: attachments, and
//! structures that are shared with the programs (`bpf/fan_intf.h`).

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libbpf_rs::ProgramMut;

use crate::Error;
pub use crate::intf::generated::NetPath;
use crate::tc::{KernelHook, Mechanism, TcAttachment, TcPosition};

impl NetPath {
    /// Returns two addresses and their ports in the form that BPF programs use. Returns `None` if one address is IPv4
    /// and the other IPv6. IPv4-mapped IPv6 addresses count as IPv4.
    pub fn new(local: SocketAddr, remote: SocketAddr) -> Option<Self> {
        let (family, from) = bytes(local.ip());
        let (other, to) = bytes(remote.ip());
        (family == other).then(|| Self {
            local: from,
            remote: to,
            local_port: local.port().to_be_bytes(),
            remote_port: remote.port().to_be_bytes(),
            family,
            ..Self::default()
        })
    }
}

/// Returns family and address in the form that programs use: an IPv4 address is in the first 4 bytes.
pub fn bytes(ip: IpAddr) -> (u8, [u8; 16]) {
    match ip.to_canonical() {
        IpAddr::V4(ip) => {
            let mut bytes = [0; 16];
            bytes[..4].copy_from_slice(&ip.octets());
            (4, bytes)
        }
        IpAddr::V6(ip) => (6, ip.octets()),
    }
}

/// Attachments of a program, by interface.
#[derive(Default)]
pub struct Attachments(Mutex<HashMap<i32, TcAttachment>>);

impl Attachments {
    /// Attaches the program so that it runs before all other programs of the interface, and allows programs to look up
    /// routes. Does nothing if it is attached already.
    pub fn attach(
        &self,
        program: &ProgramMut<'_>,
        ifindex: i32,
        hook: KernelHook,
        mechanism: Option<Mechanism>,
    ) -> Result<Mechanism, Error> {
        let mut all = self.lock();
        if let Some(there) = all.get(&ifindex).filter(|there| there.is_in_place()) {
            return Ok(there.mechanism());
        }
        // The old attachment is dropped first: dropping it later would also remove the new one.
        all.remove(&ifindex);
        allow_route_lookup()?;
        let attachment = TcAttachment::new(program, ifindex, hook, TcPosition::First, mechanism)?;
        let mechanism = attachment.mechanism();
        all.insert(ifindex, attachment);
        Ok(mechanism)
    }

    /// Reports whether the program is still attached to the interface.
    pub fn has(&self, ifindex: i32) -> bool {
        self.lock().get(&ifindex).is_some_and(TcAttachment::is_in_place)
    }

    /// Detaches the program from an interface.
    pub fn remove(&self, ifindex: i32) {
        self.lock().remove(&ifindex);
    }

    /// Reports whether the program is attached to no interface.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Detaches the program from all interfaces.
    pub fn clear(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i32, TcAttachment>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Enables forwarding on the loopback interface, which `fan.h` uses as the input interface of route look-ups. The
/// kernel only looks up routes for an input interface that forwards.
fn allow_route_lookup() -> Result<(), Error> {
    const V4: &str = "/proc/sys/net/ipv4/conf/lo/forwarding";
    const V6: &str = "/proc/sys/net/ipv6/conf/lo/forwarding";
    for path in [V4, V6] {
        match std::fs::read(path) {
            Ok(flag) if flag.starts_with(b"1") => {}
            // The host has no IPv6.
            Err(source) if path == V6 && source.kind() == io::ErrorKind::NotFound => {}
            _ => std::fs::write(path, "1").map_err(|source| Error::Sysctl { path, source })?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_with_two_address_families_is_refused() {
        let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
        assert_eq!(NetPath::new(at("10.0.0.1:1"), at("[::1]:2")), None);
        let mapped = NetPath::new(at("10.0.0.1:1"), at("[::ffff:10.0.0.2]:2")).expect("both are IPv4");
        assert_eq!((mapped.family, &mapped.remote[..5]), (4, &[10, 0, 0, 2, 0][..]));
    }
}
