//! What all fan-outs have in common: where their programs are attached, and what they share with them (`bpf/fan_intf.h`).

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libbpf_rs::ProgramMut;

use crate::Error;
pub use crate::intf::generated::NetPath;
use crate::tc::{Attachment, Hook, Mechanism, Position};

impl NetPath {
    /// `None`: the ends are of different families. IPv4 addresses mapped into IPv6 count as IPv4.
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

/// Family and address, as programs have it: IPv4 in the first 4 bytes.
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

/// A program's attachments, by interface.
#[derive(Default)]
pub struct Attachments(Mutex<HashMap<i32, Attachment>>);

impl Attachments {
    /// To TC ingress, before all others. Routes can be looked up from then on.
    pub fn attach(
        &self,
        program: &ProgramMut<'_>,
        ifindex: i32,
        mechanism: Option<Mechanism>,
    ) -> Result<Mechanism, Error> {
        let mut all = self.lock();
        if let Some(there) = all.get(&ifindex).filter(|there| there.is_in_place()) {
            return Ok(there.mechanism());
        }
        // Dropped first: it would take away what is attached in its place.
        all.remove(&ifindex);
        allow_route_lookup()?;
        let attachment = Attachment::new(program, ifindex, Hook::Ingress, Position::First, mechanism)?;
        let mechanism = attachment.mechanism();
        all.insert(ifindex, attachment);
        Ok(mechanism)
    }

    pub fn has(&self, ifindex: i32) -> bool {
        self.lock().get(&ifindex).is_some_and(Attachment::is_in_place)
    }

    pub fn remove(&self, ifindex: i32) {
        self.lock().remove(&ifindex);
    }

    pub fn clear(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i32, Attachment>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn allow_route_lookup() -> Result<(), Error> {
    const V4: &str = "/proc/sys/net/ipv4/conf/lo/forwarding";
    const V6: &str = "/proc/sys/net/ipv6/conf/lo/forwarding";
    for path in [V4, V6] {
        match std::fs::read(path) {
            Ok(flag) if flag.starts_with(b"1") => {}
            // A host without IPv6.
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
    fn ends_are_of_one_family() {
        let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
        assert_eq!(NetPath::new(at("10.0.0.1:1"), at("[::1]:2")), None);
        let mapped = NetPath::new(at("10.0.0.1:1"), at("[::ffff:10.0.0.2]:2")).expect("both are IPv4");
        assert_eq!((mapped.family, &mapped.remote[..5]), (4, &[10, 0, 0, 2, 0][..]));
    }
}
