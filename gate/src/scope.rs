//! What an application tells about its connections.

use std::{
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex},
};

use crate::kernel::{self as kernel, token};

use crate::{
    Error,
    inner::{Inner, lock},
};

/// An application's side of its scope. Clones share it. It stays valid, and without effect, when the gate is gone.
#[derive(Clone)]
pub struct Scope {
    gate: Arc<Inner>,
    name: String,
    kernel: kernel::Scope,
}

impl Scope {
    pub(crate) fn new(gate: Arc<Inner>, name: String, kernel: kernel::Scope) -> Self {
        Self { gate, name, kernel }
    }

    /// Counts a connection of `client` until the result is dropped. To be called when the handshake is complete, not
    /// before: an Initial proves nothing about its address, and would count for whomever it names.
    pub fn connection(&self, client: IpAddr) -> Result<Connection, Error> {
        self.inc(client)?;
        Ok(Connection { scope: self.clone(), client, ids: Mutex::default() })
    }

    /// A client has one connection more; returns how many it has. For scopes with `count = "application"`. The gate
    /// refuses Initials beyond the quota, and this never does: of handshakes that run at the same time more may
    /// complete, so a server that means the quota strictly closes the connection if the result is higher.
    pub fn inc(&self, client: IpAddr) -> Result<u32, Error> {
        Ok(self.kernel.inc(client.to_canonical())?)
    }

    /// A client has one connection less; returns how many it has.
    pub fn dec(&self, client: IpAddr) -> Result<u32, Error> {
        Ok(self.kernel.dec(client.to_canonical())?)
    }

    /// How many connections the client has to whom the address belongs.
    pub fn connections(&self, client: IpAddr) -> Result<u32, Error> {
        Ok(self.kernel.connections(client.to_canonical())?)
    }

    /// Packets with this connection ID belong to a live connection until it is retired. For scopes with
    /// `live = "published"`; to be called before the peer is told.
    pub fn publish(&self, id: &[u8]) -> Result<(), Error> {
        Ok(self.kernel.publish(id)?)
    }

    pub fn retire(&self, id: &[u8]) -> Result<(), Error> {
        Ok(self.kernel.retire(id)?)
    }

    /// Whether an Initial's token is of a Retry packet of the gate to this client. The server must put
    /// [`original_id`](token::Token::original_id) and the packet's destination connection ID into its transport
    /// parameters (RFC 9000, section 7.3); the latter is [`retry_id`](token::Token::retry_id) if the gate let the packet
    /// pass for the token. On any error: as if there were no token.
    pub fn check_token(&self, client: SocketAddr, token: &[u8]) -> Result<token::Token, token::Error> {
        self.gate.check_token(&self.name, client, token)
    }

    /// Whether a token is authentic, and what it says: for QUIC libraries that compare address and time themselves.
    pub fn open_token(&self, token: &[u8]) -> Result<token::Token, token::Error> {
        self.gate.open_token(&self.name, token)
    }
}

/// A connection that counts; when it is dropped it does not any more, and its IDs are retired.
pub struct Connection {
    scope: Scope,
    client: IpAddr,
    ids: Mutex<Vec<Vec<u8>>>,
}

impl Connection {
    /// The address that it counts for, also when the client has moved on.
    pub fn client(&self) -> IpAddr {
        self.client
    }

    /// [`Scope::publish`], for as long as the connection lives.
    pub fn publish(&self, id: &[u8]) -> Result<(), Error> {
        self.scope.publish(id)?;
        lock(&self.ids).push(id.to_vec());
        Ok(())
    }

    pub fn retire(&self, id: &[u8]) -> Result<(), Error> {
        lock(&self.ids).retain(|known| known != id);
        self.scope.retire(id)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // Whatever fails here fails because the kernel's maps are gone, or never had the entry.
        for id in lock(&self.ids).drain(..) {
            let _ = self.scope.retire(&id);
        }
        let _ = self.scope.dec(self.client);
    }
}
