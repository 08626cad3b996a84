//! Limits per client address and per network of clients. A client is an IPv4 address or an IPv6 /64, but a customer
//! with an IPv6 /48 has 65,536 networks of that size. Each wider network therefore has a limit of its own, a multiple
//! of one client's limit. The multiple is large enough for a NAT, or a site with many clients.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Prefix lengths of IPv4 and IPv6 networks, the narrowest first. Each has a factor: the network's limit is that many
/// times the limit of one client.
const LEVELS_V4: [(u8, usize); 2] = [(32, 1), (24, 8)];
const LEVELS_V6: [(u8, usize); 3] = [(64, 1), (56, 8), (48, 64)];

/// A network, as an address prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NetworkPrefix {
    /// The first address of the network.
    pub address: IpAddr,
    /// The prefix length in bits.
    pub length: u8,
}

impl NetworkPrefix {
    /// Returns the network with this prefix length that contains an address. An IPv4-mapped IPv6 address counts as the
    /// IPv4 address.
    pub fn from_address(address: IpAddr, length: u8) -> Self {
        let address = match address.to_canonical() {
            IpAddr::V4(address) => {
                // A shift by all bits of the number overflows, so a prefix of length 0 gets the mask 0.
                let mask = u32::MAX.checked_shl(32 - u32::from(length.min(32))).unwrap_or(0);
                Ipv4Addr::from_bits(address.to_bits() & mask).into()
            }
            IpAddr::V6(address) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(length.min(128))).unwrap_or(0);
                Ipv6Addr::from_bits(address.to_bits() & mask).into()
            }
        };
        Self { address, length }
    }

    /// Reports whether the address is in the network.
    pub fn contains(self, address: IpAddr) -> bool {
        self == Self::from_address(address, self.length)
    }
}

/// Returns the networks that contain an address, the narrowest first. Each has the factor by which its limit exceeds
/// one client's limit.
pub fn levels(address: IpAddr) -> impl Iterator<Item = (NetworkPrefix, usize)> {
    let levels = match address.to_canonical() {
        IpAddr::V4(_) => &LEVELS_V4[..],
        IpAddr::V6(_) => &LEVELS_V6[..],
    };
    levels.iter().map(move |(length, times)| (NetworkPrefix::from_address(address, *length), *times))
}

/// Returns the address that identifies a client: the first address of its narrowest network.
pub fn client(address: IpAddr) -> IpAddr {
    levels(address).next().map_or(address, |(network, _)| network.address)
}

/// Returns the limit of a network: `times` times `of_client`, the limit of one client, but at most half of `all`, the
/// limit of all clients together.
pub fn network_limit(of_client: usize, times: usize, all: usize) -> usize {
    of_client.saturating_mul(times).min(all.div_ceil(2))
}

/// A count of the slots that clients occupy, such as sessions of a relay. Each client and each network of clients has a
/// limit.
#[derive(Clone, Debug)]
pub struct NetworkPlaces {
    all: usize,
    of_client: usize,
    taken: usize,
    counts: HashMap<NetworkPrefix, NetworkUse>,
}

#[derive(Clone, Copy, Debug)]
struct NetworkUse {
    places: usize,
    /// Factor by which the network's limit exceeds one client's limit.
    times: usize,
}

/// The reason why a client gets no slot, such as a session of a relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkFull {
    /// All slots are in use, by all clients together.
    All,
    /// The client, an IPv4 address or an IPv6 /64, uses as many slots as one client may.
    Client(NetworkPrefix),
    /// An IP network that contains the client uses as many slots as it may.
    Wider(NetworkPrefix),
}

impl NetworkPlaces {
    /// Creates `all` slots, all of them free. One client may use `of_client` slots, and no network more than half of
    /// all slots.
    pub fn new(all: usize, of_client: usize) -> Self {
        Self { all, of_client, taken: 0, counts: HashMap::new() }
    }

    /// Changes how many slots one client may use. Clients above the new limit keep their slots.
    pub fn set_of_client(&mut self, of_client: usize) {
        self.of_client = of_client;
    }

    /// Takes a slot for this address.
    ///
    /// # Errors
    /// Fails if every slot is in use, or a network that contains the address uses as many slots as it may.
    pub fn enter(&mut self, address: IpAddr) -> Result<(), NetworkFull> {
        // All networks of the address are checked before one is counted, so a refusal changes nothing.
        if let Some(full) = self.full(address) {
            return Err(full);
        }
        self.taken += 1;
        for (network, times) in levels(address) {
            self.counts.entry(network).or_insert(NetworkUse { places: 0, times }).places += 1;
        }
        Ok(())
    }

    /// Returns why no slot is available for this address, or `None` if one is.
    pub fn full(&self, address: IpAddr) -> Option<NetworkFull> {
        let is_full = |(network, times): &(NetworkPrefix, usize)| {
            let places = self.counts.get(network).map_or(0, |count| count.places);
            places >= network_limit(self.of_client, *times, self.all)
        };
        // The narrowest full network is reported: the limit of the client itself comes before those of wider networks.
        match levels(address).find(is_full) {
            Some((network, 1)) => Some(NetworkFull::Client(network)),
            Some((network, _)) => Some(NetworkFull::Wider(network)),
            None => (self.taken >= self.all).then_some(NetworkFull::All),
        }
    }

    /// Frees a slot that this address has taken.
    pub fn leave(&mut self, address: IpAddr) {
        self.taken = self.taken.saturating_sub(1);
        for (network, _) in levels(address) {
            if let Some(count) = self.counts.get_mut(&network) {
                count.places -= 1;
                // Networks without slots in use are removed, so that the map does not grow with every address ever
                // seen.
                if count.places == 0 {
                    self.counts.remove(&network);
                }
            }
        }
    }

    /// Returns the clients that use slots, such as sessions of a relay. Each client has its number of slots.
    pub fn clients(&self) -> impl Iterator<Item = (IpAddr, usize)> {
        let clients = self.counts.iter().filter(|(_, count)| count.times == 1);
        clients.map(|(client, count)| (client.address, count.places))
    }

    /// Returns how many slots are in use.
    pub fn taken(&self) -> usize {
        self.taken
    }

    /// Returns the load of an address: how full, relative to its limit, the fullest network that contains the address
    /// is. The unit is arbitrary, but the same for all addresses.
    pub fn load(&self, address: IpAddr) -> usize {
        levels(address)
            .filter_map(|(network, _)| self.counts.get(&network))
            .map(NetworkUse::load)
            .max()
            .unwrap_or(0)
    }

    /// Returns the greatest [`load`](Self::load) of all addresses that use slots.
    pub fn greatest_load(&self) -> usize {
        self.counts.values().map(NetworkUse::load).max().unwrap_or(0)
    }
}

impl NetworkUse {
    fn load(&self) -> usize {
        const WIDEST: usize = LEVELS_V6[2].1;
        // A load is the number of slots in use, divided by the factor of the network's limit. It is first multiplied by
        // the greatest factor, because integer division would otherwise lose too much precision.
        self.places * WIDEST / self.times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn client_is_one_ipv4_address_or_one_ipv6_slash_64() {
        let table = [
            ("192.0.2.1", "192.0.2.1"),
            ("::ffff:192.0.2.1", "192.0.2.1"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ];
        for (given, wanted) in table {
            assert_eq!(client(address(given)), address(wanted));
        }
    }

    #[test]
    fn ip_address_is_assigned_to_its_24_bit_or_48_56_and_64_bit_prefixes() {
        let table: [(&str, &[(&str, u8)]); 4] = [
            ("192.0.2.77", &[("192.0.2.77", 32), ("192.0.2.0", 24)]),
            ("::ffff:192.0.2.77", &[("192.0.2.77", 32), ("192.0.2.0", 24)]),
            (
                "2001:db8:1:2345:6::7",
                &[("2001:db8:1:2345::", 64), ("2001:db8:1:2300::", 56), ("2001:db8:1::", 48)],
            ),
            ("::1", &[("::", 64), ("::", 56), ("::", 48)]),
        ];
        for (text, want) in table {
            let found: Vec<_> = levels(address(text)).map(|(it, _)| (it.address, it.length)).collect();
            let want: Vec<_> = want.iter().map(|(text, length)| (address(text), *length)).collect();
            assert_eq!(found, want, "{text}");
        }
        assert!(NetworkPrefix::from_address(address("192.0.2.1"), 24).contains(address("::ffff:192.0.2.9")));
        assert!(!NetworkPrefix::from_address(address("192.0.2.1"), 24).contains(address("192.0.3.1")));
        assert!(NetworkPrefix::from_address(address("192.0.2.1"), 0).contains(address("8.8.8.8")));
    }

    /// A client that opens sessions from many addresses of one network leaves enough slots for other clients.
    #[test]
    fn sessions_from_one_ip_prefix_leave_room_for_other_clients() {
        type Nth = fn(u32) -> IpAddr;
        let table: [(&str, Nth, usize); 5] = [
            ("one address", |_| Ipv4Addr::new(192, 0, 2, 1).into(), 2),
            ("a /24", |n| Ipv4Addr::new(192, 0, 2, n as u8).into(), 16),
            ("a /64", |n| Ipv6Addr::from_bits(u128::from(n)).into(), 2),
            ("a /56", |n| Ipv6Addr::from_bits(u128::from(n & 0xff) << 64).into(), 16),
            ("a /48", |n| Ipv6Addr::from_bits(u128::from(n & 0xffff) << 64).into(), 32),
        ];
        for (whose, nth, want) in table {
            let mut places = NetworkPlaces::new(64, 2);
            let taken: Vec<_> = (0..70_000).map(nth).filter(|at| places.enter(*at).is_ok()).collect();
            assert_eq!(taken.len(), want, "{whose}");
            let other = address("203.0.113.7");
            assert_eq!(places.enter(other), Ok(()), "{whose}");
            places.leave(other);
            taken.into_iter().for_each(|at| places.leave(at));
            assert!(places.counts.is_empty() && places.taken == 0, "{whose}");
        }
    }

    #[test]
    fn number_of_clients_of_all_networks_together_is_limited() {
        let mut places = NetworkPlaces::new(10, 2);
        let each = (0..100).map(|n| IpAddr::from(Ipv4Addr::new(10, n, 0, 1)));
        assert_eq!(each.filter(|at| places.enter(*at).is_ok()).count(), 10);
        assert_eq!(places.full(address("192.0.2.1")), Some(NetworkFull::All));
    }

    #[test]
    fn refusal_names_the_ip_prefix_that_reached_its_client_limit() {
        let mut places = NetworkPlaces::new(1000, 1);
        let network = |text: &str, length| NetworkPrefix { address: address(text), length };
        for n in 0..64 {
            let at = Ipv6Addr::from_bits(0x2001_0db8_u128 << 96 | n << 72);
            assert_eq!(places.enter(at.into()), Ok(()));
        }
        assert_eq!(places.full(address("2001:db8::1")), Some(NetworkFull::Client(network("2001:db8::", 64))));
        assert_eq!(
            places.full(address("2001:db8:0:ff00::1")),
            Some(NetworkFull::Wider(network("2001:db8::", 48)))
        );
        assert_eq!(places.full(address("2001:db8:1::1")), None);
    }

    /// A network in which 40 clients use one slot each has a lower load than one client that uses two slots.
    #[test]
    fn load_of_an_ip_prefix_is_its_session_count_divided_by_its_limit() {
        let mut places = NetworkPlaces::new(1000, 10);
        for n in 0..40 {
            assert_eq!(places.enter(Ipv6Addr::from_bits(0x2001_0db8_u128 << 96 | n << 72).into()), Ok(()));
        }
        assert_eq!(places.load(address("2001:db8::1")), 64, "one place of a client's");
        let greedy = address("192.0.2.1");
        (0..2).for_each(|_| assert_eq!(places.enter(greedy), Ok(())));
        assert_eq!((places.load(greedy), places.greatest_load()), (128, 128));
        for n in 0..130 {
            assert_eq!(
                places.enter(Ipv6Addr::from_bits(0x2001_0db8_0001_u128 << 80 | n << 64).into()).is_ok(),
                n < 80
            );
        }
        assert_eq!(
            places.load(address("2001:db8:1::1")),
            640,
            "80 places of a /56, which may hold 8 times a client's"
        );
    }
}
