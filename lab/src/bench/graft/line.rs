//! Connects two hosts that run packet grafts (packet functions in the kernel), for benchmarks. The two are peers and
//! share one key. Each runs in a daemon or in this process.

use std::net::IpAddr;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};

use anyhow::anyhow;
use millrace_graft::ObjectIdentity;
use millrace_graft::packet::PacketRuntime;
use millrace_graft::packet::keys::{Exported, PeerKeyMessage};
use ring::rand::{SecureRandom as _, SystemRandom};

/// Name that each host's settings give to the other host.
pub const PEER: &str = "other";

/// Returns the settings of a host whose peer has the same key, and creates the key if it is missing. `ports` is the UDP
/// port of the peers' sessions, or a range of ports.
pub fn peer(directory: &Path, [local, remote]: [IpAddr; 2], ports: &str) -> anyhow::Result<String> {
    let file = directory.join("host.key");
    if !file.exists() {
        std::fs::write(&file, rcgen::KeyPair::generate()?.serialize_pem())?;
    }
    let pair = rcgen::KeyPair::from_pem(&std::fs::read_to_string(&file)?)?;
    let key = ObjectIdentity::from_image(&rcgen::PublicKeyData::subject_public_key_info(&pair));
    Ok(format!(
        "[agreement]\nkey = \"host.key\"\n\
         [[peer]]\nname = \"{PEER}\"\nkey = \"{key}\"\n[peer.sessions]\nlocal = \"{local}\"\nremote = \"{remote}\"\nports = \"{ports}\"\n"
    ))
}

/// One end of a channel for the messages of the key exchange. It replaces the TLS connection between two daemons if
/// both hosts' packet grafts run in this process.
pub struct ChannelEnd {
    exported: Exported,
    says: Sender<PeerKeyMessage>,
    hears: Receiver<PeerKeyMessage>,
}

impl ChannelEnd {
    pub fn pair() -> anyhow::Result<[Self; 2]> {
        let mut secret = [0; 32];
        SystemRandom::new().fill(&mut secret).map_err(|_| anyhow!("the system has no random numbers"))?;
        let (says, other_hears) = channel();
        let (other_says, hears) = channel();
        let exported = Exported(secret);
        let other = Self { exported: exported.clone(), says: other_says, hears: other_hears };
        Ok([Self { exported, says, hears }, other])
    }

    pub fn connect(&self, runtime: &mut PacketRuntime) -> anyhow::Result<()> {
        Ok(runtime.connected(PEER, &self.exported)?)
    }

    /// Passes messages of the key exchange between the channel and the host's packet graft runtime. It must be called
    /// before each call of the runtime's `step`.
    pub fn relay(&self, runtime: &mut PacketRuntime) -> anyhow::Result<()> {
        for message in self.hears.try_iter() {
            runtime.receive_key_message(PEER, &message)?;
        }
        // A send error is ignored: it only means that the channel's other end was dropped.
        for (_, message) in runtime.take_key_messages() {
            let _ = self.says.send(message);
        }
        Ok(())
    }
}
