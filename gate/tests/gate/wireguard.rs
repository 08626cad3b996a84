//! Configures WireGuard devices by generic netlink, as `wg set` does.

use std::os::fd::AsRawFd as _;

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, socket,
};

use crate::net::inside;

// Constants from linux/netlink.h and linux/genetlink.h.
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLMSG_ERROR: u16 = 2;
const NLA_F_NESTED: u16 = 0x8000;
const HEADER: usize = 16;
const GENL_ID_CTRL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
// Constants from linux/wireguard.h.
const WG_CMD_SET_DEVICE: u8 = 1;
const WGDEVICE_A_IFNAME: u16 = 2;
const WGDEVICE_A_PRIVATE_KEY: u16 = 3;
const WGDEVICE_A_LISTEN_PORT: u16 = 6;
const WGDEVICE_A_PEERS: u16 = 8;
const WGPEER_A_PUBLIC_KEY: u16 = 1;
const WGPEER_A_ENDPOINT: u16 = 4;
const WGPEER_A_ALLOWEDIPS: u16 = 9;
const WGALLOWEDIP_A_FAMILY: u16 = 1;
const WGALLOWEDIP_A_IPADDR: u16 = 2;
const WGALLOWEDIP_A_CIDR_MASK: u16 = 3;

/// Private and public keys of two peers, which were made for this test.
const KEYS: [(&str, &str); 2] = [
    (
        "709bc4ebb4f809263b87dccb8a7204e3bb7a50e8b5a85fbdac8abd7fbe35bc5d",
        "b7f66eaa85316a5a37173c5f9875c6f6942ecbf1b84b89d9d27c3f3a9bfc0401",
    ),
    (
        "5858268e49975bcf1f891ebb8325de8532ca11e441022aa64386750bb633bd55",
        "5e7d55873b270e55890a268f72804e14fe878e08a885b13c0b74339d7ee4c957",
    ),
];
const PORT: u16 = 51820;

/// Configures a device as one of two peers. The other peer is at `other_at`, and may send packets from any address.
pub fn set_up(namespace: &str, device: &str, own: usize, other_at: [u8; 4]) {
    let endpoint = [&2_u16.to_ne_bytes()[..], &PORT.to_be_bytes(), &other_at, &[0; 8]].concat();
    let everything = [
        attribute(WGALLOWEDIP_A_FAMILY, &2_u16.to_ne_bytes()),
        attribute(WGALLOWEDIP_A_IPADDR, &[0; 4]),
        attribute(WGALLOWEDIP_A_CIDR_MASK, &[0]),
    ];
    let peer = [
        attribute(WGPEER_A_PUBLIC_KEY, &key(KEYS[1 - own].1)),
        attribute(WGPEER_A_ENDPOINT, &endpoint),
        nested(WGPEER_A_ALLOWEDIPS, &nested(0, &everything.concat())),
    ];
    let settings = [
        attribute(WGDEVICE_A_IFNAME, format!("{device}\0").as_bytes()),
        attribute(WGDEVICE_A_PRIVATE_KEY, &key(KEYS[own].0)),
        attribute(WGDEVICE_A_LISTEN_PORT, &PORT.to_ne_bytes()),
        nested(WGDEVICE_A_PEERS, &nested(0, &peer.concat())),
    ];
    inside(namespace, || {
        let name = attribute(CTRL_ATTR_FAMILY_NAME, b"wireguard\0");
        let family = ask(GENL_ID_CTRL, CTRL_CMD_GETFAMILY, NLM_F_REQUEST, &name);
        let id = find(&family[HEADER + 4..], CTRL_ATTR_FAMILY_ID);
        let done = ask(id, WG_CMD_SET_DEVICE, NLM_F_REQUEST | NLM_F_ACK, &settings.concat());
        assert_eq!(done[HEADER..HEADER + 4], [0; 4], "WireGuard takes its settings");
    });
}

fn key(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex")).collect()
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = u16::try_from(4 + value.len()).expect("short");
    let mut bytes = [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), value].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn nested(kind: u16, attributes: &[u8]) -> Vec<u8> {
    attribute(kind | NLA_F_NESTED, attributes)
}

/// Returns the value of the 16-bit netlink attribute of type `wanted`.
fn find(mut attributes: &[u8], wanted: u16) -> u16 {
    loop {
        let word = |at: usize| u16::from_ne_bytes([attributes[at], attributes[at + 1]]);
        if word(2) == wanted {
            return word(4);
        }
        attributes = &attributes[usize::from(word(0)).next_multiple_of(4)..];
    }
}

/// Returns the first message that answers a request.
fn ask(kind: u16, command: u8, flags: u16, attributes: &[u8]) -> Vec<u8> {
    let family = AddressFamily::Netlink;
    let socket = socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkGeneric);
    let socket = socket.expect("a netlink socket");
    let len = u32::try_from(HEADER + 4 + attributes.len()).expect("short");
    let mut message = [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), &flags.to_ne_bytes(), &[0; 8]].concat();
    message.extend([command, 1, 0, 0]);
    message.extend(attributes);
    sendto(socket.as_raw_fd(), &message, &NetlinkAddr::new(0, 0), MsgFlags::empty()).expect("sent");
    let mut answer = vec![0; 8192];
    let len = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty()).expect("an answer");
    answer.truncate(len);
    let is_error = u16::from_ne_bytes([answer[4], answer[5]]) == NLMSG_ERROR;
    assert!(!is_error || flags & NLM_F_ACK != 0, "refused: {:?}", &answer[HEADER..HEADER + 4]);
    answer
}
