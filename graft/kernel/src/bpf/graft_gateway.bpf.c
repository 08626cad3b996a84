// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/* Redirects TCP connections of hosts behind this one to the tunnel broker, which tunnels them. Neither these hosts
 * nor their servers notice.
 *
 * It runs at the interfaces of the inside networks. A SYN that a rule matches, to a peer's network, is held
 * back until the broker reports whether the server was reached. Then the SYN is delivered to the broker's
 * listening socket, as if that were the server. Later packets are assigned to the broker's sockets and
 * marked; a routing rule of the host delivers marked packets locally. All other packets are passed on and
 * forwarded as without a gateway.
 */
#include "graft_gateway_intf.h"
#include "hook_rules.h"
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <stddef.h>

#define DROP	     2
#define HEADER_LEAST 20
/* bits of the IPv4 header that are set in fragments: "more fragments", and the fragment offset */
#define IPV4_FRAGMENT	   0x3fff
#define ICMP_BYTES	   8 /* bytes of an ICMP header; behind it is the packet that caused the error */
#define ICMP_UNREACHABLE   3
#define ICMP_TIME_EXCEEDED 11
#define ICMPV6_UNREACHABLE 1
#define ICMPV6_TIME_EXCEED 3 /* ICMPv6 types 1 to 3 are errors; 2 is "packet too big" */
#define VLAN_ID		   0x0fff

const volatile struct gateway_config config SEC(".rodata.config");

/* Networks and hosts of peers. The value is 1 while a carrier (a connection that tunnels others) to the peer is
 * established.
 */
BPF_MAP_FLAGS(LPM_TRIE, peers, struct gateway_prefix, __u32, GATEWAY_PREFIXES, BPF_F_NO_PREALLOC);

/* Inside networks, which are behind this gateway: only connections of clients in them are redirected. */
BPF_MAP_FLAGS(LPM_TRIE, inside, struct gateway_prefix, __u32, GATEWAY_PREFIXES, BPF_F_NO_PREALLOC);

BPF_MAP(LRU_HASH, flows, struct gateway_flow, struct gateway_state, GATEWAY_FLOWS);

/* Time until which the tunnel broker counts as alive (CLOCK_MONOTONIC, ns). The broker renews it. */
BPF_MAP(ARRAY, alive, __u32, __u64, 1);

BPF_RING(asks, 1 << 20);

/* Number of packets, by enum gateway_verdict. */
BPF_MAP(PERCPU_ARRAY, verdicts, __u32, __u64, GATEWAY_VERDICTS);

struct packet {
	struct gateway_flow flow; /* client and server of the connection, if the client sent this packet */
	__u32 next;		  /* offset of the TCP or ICMP header from the start of the IP header */
	__u8 protocol;
	bool is_v4;
	bool is_fragment;
};

static __always_inline long load(struct __sk_buff *skb, __u32 at, void *to, __u32 bytes)
{
	return bpf_skb_load_bytes_relative(skb, at, to, bytes, BPF_HDR_START_NET);
}

static __always_inline long read_v4(struct __sk_buff *skb, __u32 at, struct packet *packet)
{
	struct iphdr ip;

	if (load(skb, at, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5)
		return -1;
	set_v4(&packet->flow.client, ip.saddr);
	set_v4(&packet->flow.server, ip.daddr);
	packet->next = at + ip.ihl * 4;
	packet->protocol = ip.protocol;
	packet->is_fragment = ip.frag_off & bpf_htons(IPV4_FRAGMENT);
	return 0;
}

/* Reads an IPv6 header. Packets with extension headers are treated as not TCP. */
static __always_inline long read_v6(struct __sk_buff *skb, __u32 at, struct packet *packet)
{
	struct ipv6hdr ip;

	if (load(skb, at, &ip, sizeof(ip)) || ip.version != 6)
		return -1;
	__builtin_memcpy(packet->flow.client.address, &ip.saddr, sizeof(ip.saddr));
	__builtin_memcpy(packet->flow.server.address, &ip.daddr, sizeof(ip.daddr));
	packet->next = at + sizeof(ip);
	packet->protocol = ip.nexthdr;
	packet->is_fragment = ip.nexthdr == IPPROTO_FRAGMENT;
	return 0;
}

static __always_inline long read_ip(struct __sk_buff *skb, __u32 at, struct packet *packet)
{
	return packet->is_v4 ? read_v4(skb, at, packet) : read_v6(skb, at, packet);
}

static __always_inline const __u32 *find(void *trie, const struct hook_end *end)
{
	struct gateway_prefix key = {.bits = 128};

	__builtin_memcpy(key.address, end->address, sizeof(key.address));
	return bpf_map_lookup_elem(trie, &key);
}

/* Fills in the socket lookup tuple of a packet from `from` to `to`. Returns its length in bytes. */
static __always_inline __u32 tuple_of(bool is_v4, const struct hook_end *from, const struct hook_end *to,
				      struct bpf_sock_tuple *tuple)
{
	if (is_v4) {
		tuple->ipv4.saddr = from->address[3];
		tuple->ipv4.daddr = to->address[3];
		tuple->ipv4.sport = bpf_htons(from->port);
		tuple->ipv4.dport = bpf_htons(to->port);
		return sizeof(tuple->ipv4);
	}
	__builtin_memcpy(tuple->ipv6.saddr, from->address, sizeof(tuple->ipv6.saddr));
	__builtin_memcpy(tuple->ipv6.daddr, to->address, sizeof(tuple->ipv6.daddr));
	tuple->ipv6.sport = bpf_htons(from->port);
	tuple->ipv6.dport = bpf_htons(to->port);
	return sizeof(tuple->ipv6);
}

static __always_inline bool is_plain(const struct gateway_flow *flow)
{
	const struct gateway_state *known = bpf_map_lookup_elem(&flows, flow);

	return known && known->state == GATEWAY_FORWARD && bpf_ktime_get_ns() < known->until_ns;
}

enum found {
	FOUND_NONE,
	FOUND_OLD, /* the tunnel broker's socket of an earlier connection with the same addresses, in TIME_WAIT */
	FOUND_ONE,
	FOUND_FAILED,
};

/* Looks up the connected socket that a packet belongs to, and assigns the packet to it if `assigns` is set.
 * A listening socket does not count.
 */
static __always_inline enum found take(struct __sk_buff *skb, const struct packet *packet, bool is_syn,
				       bool assigns)
{
	struct bpf_sock_tuple tuple = {};
	__u32 bytes = tuple_of(packet->is_v4, &packet->flow.client, &packet->flow.server, &tuple);
	enum found found = FOUND_ONE;
	struct bpf_sock *sk;

	/* The verifier requires a constant tuple size, so each address family has its own call. */
	if (bytes == sizeof(tuple.ipv4))
		sk = bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0);
	else
		sk = bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv6), BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return FOUND_NONE;
	if (sk->state == BPF_TCP_LISTEN)
		found = FOUND_NONE;
	else if (sk->state == BPF_TCP_TIME_WAIT && (is_syn || is_plain(&packet->flow)))
		found = FOUND_OLD;
	else if (assigns && bpf_sk_assign(skb, sk, 0))
		found = FOUND_FAILED;
	bpf_sk_release(sk);
	if (found == FOUND_ONE)
		skb->mark = config.mark;
	return found;
}

/* Delivers a SYN to the tunnel broker's listening socket. */
static __always_inline enum gateway_verdict let_in(struct __sk_buff *skb, const struct packet *packet)
{
	struct hook_end broker = {};
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *sk;
	long failed = -1;

	if (packet->is_v4) {
		set_v4(&broker, bpf_htonl(LOOPBACK4));
		broker.port = config.port4;
		tuple_of(true, &packet->flow.client, &broker, &tuple);
		sk = bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0);
	} else {
		broker.address[3] = bpf_htonl(1);
		broker.port = config.port6;
		tuple_of(false, &packet->flow.client, &broker, &tuple);
		sk = bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv6), BPF_F_CURRENT_NETNS, 0);
	}
	if (!sk)
		return GATEWAY_NO_SOCKET;
	if (sk->state == BPF_TCP_LISTEN)
		failed = bpf_sk_assign(skb, sk, 0);
	bpf_sk_release(sk);
	if (failed)
		return GATEWAY_NO_SOCKET;
	skb->mark = config.mark;
	return GATEWAY_LET_IN;
}

/* The function is not inlined, so that the type of the event is in the object's BTF, where userspace's build finds it.
 */
static __noinline long send_event(const struct gateway_ask *one)
{
	return one ? bpf_ringbuf_output(&asks, (void *)one, sizeof(*one), 0) : -1;
}

static __always_inline enum gateway_verdict ask(struct __sk_buff *skb, const struct packet *packet,
						__u32 bytes, bool is_old)
{
	struct gateway_state waits = {.state = GATEWAY_WAITING};
	struct gateway_ask one = {.bytes = bytes, .old = is_old};

	one.flow = packet->flow;
	if (bytes < HEADER_LEAST || load(skb, packet->next, one.syn, BOUNDED(bytes, 64)))
		return GATEWAY_MALFORMED;
	/* The state is stored before the event is sent, so that userspace always finds it. */
	bpf_map_update_elem(&flows, &packet->flow, &waits, BPF_ANY);
	if (!send_event(&one))
		return GATEWAY_ASKED;
	/* The ring buffer was full. The state is removed, so that the client's next SYN is reported. */
	bpf_map_delete_elem(&flows, &packet->flow);
	return GATEWAY_NO_ROOM;
}

/* Returns whether the route back to the client uses the interface that its SYN arrived on. If not, the source
 * address may be forged.
 */
static __noinline bool is_way_back(struct __sk_buff *skb, const struct packet *packet)
{
	struct bpf_fib_lookup fib = {.l4_protocol = IPPROTO_TCP, .ifindex = skb->ifindex};
	long found;

	if (!packet)
		return false;
	if (packet->is_v4) {
		fib.family = AF_INET;
		fib.ipv4_src = packet->flow.server.address[3];
		fib.ipv4_dst = packet->flow.client.address[3];
	} else {
		fib.family = AF_INET6;
		__builtin_memcpy(fib.ipv6_src, packet->flow.server.address, sizeof(fib.ipv6_src));
		__builtin_memcpy(fib.ipv6_dst, packet->flow.client.address, sizeof(fib.ipv6_dst));
	}
	found = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	/* The route suffices: it does not matter if the neighbour's link address is still unknown. */
	return (found == BPF_FIB_LKUP_RET_SUCCESS || found == BPF_FIB_LKUP_RET_NO_NEIGH) &&
	       fib.ifindex == skb->ifindex;
}

static __always_inline bool is_alive(void)
{
	__u32 zero = 0;
	__u64 *until = bpf_map_lookup_elem(&alive, &zero);

	return until && bpf_ktime_get_ns() < *until;
}

/* Decides about a client's first SYN. Returns GATEWAY_ASKED if it may be redirected, or the reason why not.
 */
static __always_inline enum gateway_verdict judge(struct __sk_buff *skb, const struct packet *packet,
						  __u32 warm)
{
	struct search rule = {.end = &packet->flow.server};

	if (!is_alive())
		return GATEWAY_ASLEEP;
	/* Rules that leave the choice to the learned model (`choice`) apply only to this host's own connections. Rules
	 * with a condition on the process do not match, since the process is unknown here.
	 */
	if (!fits_a_rule(&rule) || rule.choice)
		return GATEWAY_NO_RULE;
	if (!find(&inside, &packet->flow.client))
		return GATEWAY_OUTSIDE;
	if (!(packet->is_v4 ? config.port4 : config.port6))
		return GATEWAY_NO_FAMILY;
	if (!warm)
		return GATEWAY_COLD;
	if (is_avoided(&packet->flow.server))
		return GATEWAY_REFUSED;
	return is_way_back(skb, packet) ? GATEWAY_ASKED : GATEWAY_WRONG_WAY;
}

/* Records that a connection is forwarded, although the tunnel broker was notified of it or has a socket in TIME_WAIT
 * with the same addresses and ports. Later packets are then not delivered to that socket, and the broker can no longer
 * accept the connection.
 */
static __always_inline void note_plain(const struct gateway_flow *flow)
{
	struct gateway_state plain = {
		.state = GATEWAY_FORWARD,
		/* The state GATEWAY_FORWARD ends in 120 s, which is twice the time for which a socket stays in
		 * TIME_WAIT.
		 */
		.until_ns = bpf_ktime_get_ns() + 120 * 1000000000ULL,
	};

	bpf_map_update_elem(&flows, flow, &plain, BPF_ANY);
}

static __always_inline enum gateway_verdict welcome(struct __sk_buff *skb, const struct packet *packet,
						    __u32 bytes, __u32 warm, bool is_old)
{
	const struct gateway_state *known = bpf_map_lookup_elem(&flows, &packet->flow);
	enum gateway_verdict verdict;

	/* States of a connection in `flows`: none -> WAITING (set here, when the tunnel broker is notified) -> OPEN
	 * or FORWARD (set by userspace, when the broker has decided). FORWARD expires.
	 */
	if (known && known->state == GATEWAY_OPEN)
		return let_in(skb, packet);
	if (known && known->state == GATEWAY_FORWARD && bpf_ktime_get_ns() < known->until_ns)
		return GATEWAY_PLAIN;
	verdict = judge(skb, packet, warm);
	if (!known || known->state != GATEWAY_WAITING)
		return verdict == GATEWAY_ASKED ? ask(skb, packet, bytes, is_old) : verdict;
	if (verdict == GATEWAY_ASKED)
		return GATEWAY_HELD;
	note_plain(&packet->flow);
	return verdict;
}

/* Returns whether a SYN with this verdict is held back, delivered locally or dropped, and so not forwarded. */
static __always_inline bool stays(enum gateway_verdict verdict)
{
	return verdict == GATEWAY_LET_IN || verdict == GATEWAY_ASKED || verdict == GATEWAY_HELD ||
	       verdict == GATEWAY_NO_ROOM || verdict == GATEWAY_NO_SOCKET;
}

static __always_inline enum gateway_verdict segment(struct __sk_buff *skb, struct packet *packet, __u32 warm)
{
	struct tcphdr tcp;
	enum gateway_verdict verdict;
	enum found found;
	bool is_syn;

	if (load(skb, packet->next, &tcp, sizeof(tcp)))
		return GATEWAY_MALFORMED;
	packet->flow.client.port = bpf_ntohs(tcp.source);
	packet->flow.server.port = bpf_ntohs(tcp.dest);
	is_syn = tcp.syn && !tcp.ack;
	found = take(skb, packet, is_syn, true);
	if (found == FOUND_ONE)
		return GATEWAY_TAKEN;
	if (found == FOUND_FAILED)
		return GATEWAY_NO_SOCKET;
	if (!is_syn)
		return GATEWAY_PLAIN;
	verdict = welcome(skb, packet, tcp.doff * 4, warm, found == FOUND_OLD);
	if (found == FOUND_NONE || stays(verdict))
		return verdict;
	/* The SYN is forwarded. Later packets of its connection must not be delivered to the tunnel broker's socket in
	 * TIME_WAIT, so the connection is recorded as forwarded.
	 */
	note_plain(&packet->flow);
	return GATEWAY_OLD;
}

static __always_inline bool is_error(bool is_v4, __u8 type)
{
	if (is_v4)
		return type == ICMP_UNREACHABLE || type == ICMP_TIME_EXCEEDED;
	return type >= ICMPV6_UNREACHABLE && type <= ICMPV6_TIME_EXCEED;
}

/* Handles an ICMP error. If the failed packet was sent by a socket of the tunnel broker, the kernel delivers the
 * error to that socket.
 */
static __always_inline enum gateway_verdict message(struct __sk_buff *skb, const struct packet *outer)
{
	struct packet packet = {.is_v4 = outer->is_v4};
	struct hook_end client;
	__be16 ports[2];
	__u8 type;

	if (outer->is_fragment || load(skb, outer->next, &type, sizeof(type)) ||
	    !is_error(outer->is_v4, type))
		return GATEWAY_OTHER;
	if (read_ip(skb, outer->next + ICMP_BYTES, &packet) || packet.protocol != IPPROTO_TCP ||
	    load(skb, packet.next, ports, sizeof(ports)))
		return GATEWAY_OTHER;
	packet.flow.client.port = bpf_ntohs(ports[0]);
	packet.flow.server.port = bpf_ntohs(ports[1]);
	/* The ICMP error quotes a packet that the tunnel broker has sent to the client with the server's address as its
	 * source. So the quoted source is the server.
	 */
	client = packet.flow.server;
	packet.flow.server = packet.flow.client;
	packet.flow.client = client;
	return take(skb, &packet, false, false) == FOUND_ONE ? GATEWAY_ICMP_ERROR : GATEWAY_OTHER;
}

/* Returns whether the packet is IPv4 or IPv6 without a VLAN tag. A tagged packet passes this program again,
 * untagged, at the VLAN's interface.
 */
static __always_inline bool is_ip(struct __sk_buff *skb, struct packet *packet)
{
	if (skb->vlan_present && (skb->vlan_tci & VLAN_ID))
		return false;
	packet->is_v4 = skb->protocol == bpf_htons(ETH_P_IP);
	return packet->is_v4 || skb->protocol == bpf_htons(ETH_P_IPV6);
}

static __noinline enum gateway_verdict look_at_packet(struct __sk_buff *skb)
{
	struct packet packet = {};
	const __u32 *warm;

	if (!is_ip(skb, &packet))
		return GATEWAY_OTHER;
	if (read_ip(skb, 0, &packet))
		return GATEWAY_MALFORMED;
	/* A packet that is not for a peer's host or network is passed on after this single look-up of an address.
	 */
	warm = find(&peers, &packet.flow.server);
	if (!warm)
		return GATEWAY_OTHER;
	if (packet.protocol == (packet.is_v4 ? IPPROTO_ICMP : IPPROTO_ICMPV6))
		return message(skb, &packet);
	if (packet.is_fragment)
		return GATEWAY_FRAGMENT;
	return packet.protocol == IPPROTO_TCP ? segment(skb, &packet, *warm) : GATEWAY_OTHER;
}

static __always_inline int act(enum gateway_verdict verdict)
{
	add_to(&verdicts, verdict, 1);
	switch (verdict) {
	case GATEWAY_ASKED:
	case GATEWAY_HELD:
	case GATEWAY_NO_ROOM:
	case GATEWAY_NO_SOCKET:
		return DROP;
	default:
		return PASS_ON;
	}
}

/* Runs at the ingress of the inside interfaces. */
SEC("tcx/ingress")
int gateway_in(struct __sk_buff *skb)
{
	return act(look_at_packet(skb));
}

static __noinline enum gateway_verdict look_again(struct __sk_buff *skb)
{
	struct packet packet = {};
	const struct gateway_state *known;
	struct tcphdr tcp;

	if (!is_ip(skb, &packet) || read_ip(skb, 0, &packet) || packet.protocol != IPPROTO_TCP ||
	    load(skb, packet.next, &tcp, sizeof(tcp)))
		return GATEWAY_NO_SOCKET;
	packet.flow.client.port = bpf_ntohs(tcp.source);
	packet.flow.server.port = bpf_ntohs(tcp.dest);
	known = bpf_map_lookup_elem(&flows, &packet.flow);
	return known && known->state == GATEWAY_OPEN ? let_in(skb, &packet) : GATEWAY_NO_SOCKET;
}

/* Runs at loopback. The tunnel broker holds a client's SYN until the server is reached, and then sends it there a
 * second time. Only the tunnel broker's socket may receive these SYNs: any other one would answer in the server's
 * place.
 */
SEC("tcx/ingress")
int gateway_again(struct __sk_buff *skb)
{
	return skb->mark == config.mark_again ? act(look_again(skb)) : PASS_ON;
}

char LICENSE[] SEC("license")
= "Dual BSD/GPL";
