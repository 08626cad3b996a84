//! The handle with which a guarded application (scope) reports its connections.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex},
};

use crate::kernel::{self as kernel, token};

use crate::{
    Error,
    inner::{GateInner, lock},
};

/// The handle with which a guarded application (scope) reports its connections. Clones belong to the same application.
/// After the gate is dropped, the handle has no effect.
///
/// ```no_run
/// # fn example(gate: &millrace_gate::Gate) -> Result<(), Box<dyn std::error::Error>> {
/// let scope = gate.scope("web")?;
/// // When a handshake is complete:
/// let connection = scope.connection("192.0.2.7".parse()?)?;
/// // Before the peer learns a connection ID, if the policy has `live = "published"`:
/// connection.publish(&[0x5e; 8])?;
/// // When the connection is closed:
/// drop(connection);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Scope {
    gate: Arc<GateInner>,
    name: String,
    kernel: kernel::KernelScope,
}

impl Scope {
    pub(crate) fn new(gate: Arc<GateInner>, name: String, kernel: kernel::KernelScope) -> Self {
        Self { gate, name, kernel }
    }

    /// Counts a connection of `client` until the result is dropped. Call it when the handshake is complete, not before:
    /// the source address of an Initial may be forged, and the connection would count for the wrong client.
    pub fn connection(&self, client: IpAddr) -> Result<Connection, Error> {
        self.inc(client)?;
        Ok(Connection { scope: self.clone(), client, ids: Mutex::default() })
    }

    /// Adds one connection of a client and returns the client's number of connections. Use it for scopes with
    /// `count = "application"`.
    ///
    /// The gate refuses Initials over the quota, but this call succeeds over the quota. When a client has several
    /// handshakes at the same time, more of them may complete than the quota allows. A server with a strict quota
    /// should therefore close the connection if the result exceeds the quota.
    pub fn inc(&self, client: IpAddr) -> Result<u32, Error> {
        Ok(self.kernel.inc(client.to_canonical())?)
    }

    /// Removes one connection of a client and returns the client's number of connections.
    pub fn dec(&self, client: IpAddr) -> Result<u32, Error> {
        Ok(self.kernel.dec(client.to_canonical())?)
    }

    /// Returns the number of connections of the client that the address belongs to.
    pub fn connections(&self, client: IpAddr) -> Result<u32, Error> {
        Ok(self.kernel.connections(client.to_canonical())?)
    }

    /// Tells the gate that packets with this connection ID belong to a live connection, until the ID is retired. Call
    /// it before the peer learns the ID. Use it for scopes with `live = "published"`.
    pub fn publish(&self, id: &[u8]) -> Result<(), Error> {
        Ok(self.kernel.publish(id)?)
    }

    /// Forgets a published connection ID. An unknown ID is no error.
    pub fn retire(&self, id: &[u8]) -> Result<(), Error> {
        Ok(self.kernel.retire(id)?)
    }

    /// Checks whether an Initial's token is from a Retry packet that the gate sent to this client. On any error, treat
    /// the packet as if it had no token.
    ///
    /// The server must put [`original_id`](token::Token::original_id) and the packet's destination connection ID into
    /// its transport parameters (RFC 9000, section 7.3). If the gate let the packet pass because of its token, that
    /// destination ID equals [`retry_id`](token::Token::retry_id).
    pub fn check_token(&self, client: SocketAddr, token: &[u8]) -> Result<token::Token, token::Error> {
        self.gate.check_token(&self.name, client, token)
    }

    /// Checks that a token is authentic and returns its contents. Use it with QUIC libraries that compare address and
    /// time by themselves.
    pub fn open_token(&self, token: &[u8]) -> Result<token::Token, token::Error> {
        self.gate.open_token(&self.name, token)
    }
}

/// A counted connection. When it is dropped, it no longer counts, and its published IDs are retired.
pub struct Connection {
    scope: Scope,
    client: IpAddr,
    ids: Mutex<Vec<Vec<u8>>>,
}

impl Connection {
    /// Returns the client address with which the connection was counted. It stays the same when the client migrates.
    pub fn client(&self) -> IpAddr {
        self.client
    }

    /// Publishes an ID (see [`Scope::publish`]) for as long as the connection lives.
    pub fn publish(&self, id: &[u8]) -> Result<(), Error> {
        self.scope.publish(id)?;
        lock(&self.ids).push(id.to_vec());
        Ok(())
    }

    /// Retires an ID before the connection is closed.
    pub fn retire(&self, id: &[u8]) -> Result<(), Error> {
        lock(&self.ids).retain(|known| known != id);
        self.scope.retire(id)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // `retire` and `dec` fail only if the kernel's maps are gone, or never had the entry.
        for id in lock(&self.ids).drain(..) {
            let _ = self.scope.retire(&id);
        }
        let _ = self.scope.dec(self.client);
    }
}
