//! Passes bytes between an application and a broker on the same host from one socket's send to the other's receive
//! queue (sockmap). They bypass TCP and the loopback interface.
//!
//! Tier: test-all, since it is no part of the product.

use std::{
    fs::File,
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd as _, AsRawFd as _},
    path::Path,
};

use libbpf_rs::{Link, MapCore as _, MapFlags, MapHandle, Object, ObjectBuilder};

const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/bypass.bpf.o"));
/// Size of `struct bypass_end`, bytes.
const END_BYTES: usize = 20;

/// Verdicts on send calls and on attempts to add a socket to the map, in the order of `enum bypass_verdict`.
pub const VERDICTS: [&str; 9] =
    ["passed-on", "full", "behind", "alone", "one-way", "unknown", "entered", "no-room", "early"];

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the kernel refuses the BPF programs")]
    Load(#[from] libbpf_rs::Error),
    #[error("the cgroup cannot be opened")]
    Cgroup(#[from] io::Error),
    #[error("the object has no {0}")]
    Missing(&'static str),
}

/// The BPF programs attached to a cgroup. Until this value is dropped, the programs add two kinds of sockets of the
/// cgroup to their map: sockets that connect to the broker, and the broker's own sockets.
pub struct Bypass {
    // Declared before the programs, so that links and maps are dropped before the programs that they refer to.
    _link: Link,
    taken: MapHandle,
    verdicts: MapHandle,
    _object: Object,
}

/// The broker's port, and the limits of the bytes that bypass TCP.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Port of the broker on 127.0.0.1 and ::1.
    pub port: u16,
    /// Number of bytes that may be passed to the broker before it has read them.
    pub window_bytes: u64,
    /// Whether bytes from the broker to applications are passed, too. Before Linux 6.13 the programs cannot know how
    /// many of these bytes are unread.
    pub both_ways: bool,
}

impl Bypass {
    /// Loads the programs and attaches them to a cgroup.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses the programs, or the path is not a cgroup of version 2.
    pub fn attach(config: Config, cgroup: &Path) -> Result<Self, Error> {
        // libelf requires an aligned image, which the memory of a `Vec` is.
        let image = OBJECT.to_vec();
        let mut open = ObjectBuilder::default().open_memory(&image)?;
        let mut maps = open.maps_mut();
        let place = maps.find(|map| map.name().to_string_lossy().ends_with(".rodata.config"));
        let mut place = place.ok_or(Error::Missing(".rodata.config"))?;
        let value = place.initial_value_mut().ok_or(Error::Missing("config"))?;
        value.copy_from_slice(&config.bytes());
        drop(maps);
        let object = open.load()?;
        let map = |name| object.maps().find(|map| map.name() == name).ok_or(Error::Missing(name));
        let sockets = MapHandle::try_from(&map("sockets")?)?;
        let taken = MapHandle::try_from(&map("taken")?)?;
        let verdicts = MapHandle::try_from(&map("verdicts")?)?;
        let program =
            |name| object.progs_mut().find(|program| program.name() == name).ok_or(Error::Missing(name));
        program("bypass_send")?.attach_sockmap(sockets.as_fd().as_raw_fd())?;
        let directory = File::open(cgroup)?;
        let link = program("bypass_enter")?.attach_cgroup(directory.as_raw_fd())?;
        Ok(Self { _link: link, taken, verdicts, _object: object })
    }

    /// Tells the programs how many bytes of an application's socket the broker has read so far.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses the update of the BPF map.
    pub fn take(&self, application: SocketAddr, broker: SocketAddr, bytes: u64) -> Result<(), Error> {
        let key = [end(application), end(broker)].concat();
        Ok(self.taken.update(&key, &bytes.to_ne_bytes(), MapFlags::ANY)?)
    }

    /// Returns how often the programs gave this verdict, which is one of [`VERDICTS`].
    ///
    /// # Errors
    ///
    /// Returns an error if the BPF map of counts cannot be read, or if there is no such verdict.
    pub fn count(&self, verdict: &str) -> Result<u64, Error> {
        let at = VERDICTS.iter().position(|known| *known == verdict).ok_or(Error::Missing("verdict"))?;
        let counts = self.verdicts.lookup_percpu(&(at as u32).to_ne_bytes(), MapFlags::ANY)?;
        let number = |bytes: &Vec<u8>| bytes.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes));
        Ok(counts.iter().flatten().map(number).sum())
    }
}

impl Config {
    /// Returns the bytes of `struct bypass_config`.
    fn bytes(self) -> Vec<u8> {
        let both_ways = u32::from(self.both_ways).to_ne_bytes();
        [&self.window_bytes.to_ne_bytes()[..], &both_ways, &self.port.to_ne_bytes(), &[0; 2]].concat()
    }
}

/// Returns the bytes of `struct bypass_end`.
fn end(address: SocketAddr) -> Vec<u8> {
    let octets = match address.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    let mut bytes = Vec::with_capacity(END_BYTES);
    bytes.extend(octets);
    bytes.extend(address.port().to_ne_bytes());
    bytes.extend([0; 2]);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockmap_bpf_structures_have_the_same_layout_in_rust() {
        let config = Config { port: 0x0102, window_bytes: 3, both_ways: true };
        assert_eq!((config.bytes().len(), &config.bytes()[..8]), (16, &3_u64.to_ne_bytes()[..]));
        let v4 = end("192.0.2.1:258".parse().expect("an address"));
        assert_eq!((v4.len(), &v4[10..16]), (END_BYTES, &[0xff, 0xff, 192, 0, 2, 1][..]));
        assert_eq!(&v4[16..18], &258_u16.to_ne_bytes());
    }
}
