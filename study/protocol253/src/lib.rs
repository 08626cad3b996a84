//! Datagrams between two hosts over IP protocol 253. BPF programs replace the UDP header when a packet leaves, and
//! restore it when it arrives, so applications and firewalls see UDP.
//!
//! Tier: test-all, since it is no part of the product.

use std::net::IpAddr;

use libbpf_rs::{MapCore as _, MapFlags, Object, ObjectBuilder};
use millrace_kernel::tc::{KernelHook, TcAttachment, TcPosition};

const OBJECT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/protocol253.bpf.o"));

/// IP protocol number for experiments (RFC 3692).
pub const PROTOCOL: u8 = 253;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the kernel refuses the BPF programs")]
    Load(#[from] libbpf_rs::Error),
    #[error("the BPF programs cannot be attached")]
    Attach(#[from] millrace_kernel::Error),
    #[error("the object has no {0}")]
    Missing(&'static str),
}

/// The BPF programs on one interface. They are detached when this value is dropped.
pub struct Conversion {
    // Declared before the object, so that the programs are detached before they are unloaded.
    _attached: [TcAttachment; 2],
    object: Object,
}

impl Conversion {
    /// Loads the programs and attaches them to an interface of the calling thread's network namespace. They convert no
    /// packet before [`Self::add`].
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses the programs, or if there is no such interface.
    pub fn attach(ifindex: i32) -> Result<Self, Error> {
        // libelf requires an aligned image, which the memory of a `Vec` is.
        let image = OBJECT.to_vec();
        let object = ObjectBuilder::default().open_memory(&image)?.load()?;
        // The conversion is the last step of a packet that leaves, and the first one of a packet that arrives.
        let hooks = [
            ("protocol253_out", KernelHook::Egress, TcPosition::Last),
            ("protocol253_in", KernelHook::Ingress, TcPosition::First),
        ];
        let attach = |(name, hook, position)| {
            let program = object.progs_mut().find(|program| program.name() == name);
            let program = program.ok_or(Error::Missing(name))?;
            Ok::<_, Error>(TcAttachment::new(&program, ifindex, hook, position, None)?)
        };
        let [out, into] = hooks.map(attach);
        let attached = [out?, into?];
        Ok(Self { _attached: attached, object })
    }

    /// Converts all datagrams between this host's address and another host's from now on.
    ///
    /// # Errors
    ///
    /// Returns an error if the BPF map has no room.
    pub fn add(&self, local: IpAddr, remote: IpAddr) -> Result<(), Error> {
        let map = self.object.maps().find(|map| map.name() == "pairs").ok_or(Error::Missing("pairs"))?;
        let key = [octets(local), octets(remote)].concat();
        Ok(map.update(&key, &1_u32.to_ne_bytes(), MapFlags::ANY)?)
    }
}

/// Returns the bytes of an address; IPv4 addresses are followed by zeroes.
fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => {
            let mut octets = [0; 16];
            octets[..4].copy_from_slice(&v4.octets());
            octets
        }
        IpAddr::V6(v6) => v6.octets(),
    }
}
