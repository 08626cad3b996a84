/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* A QUIC server on ngtcp2 and GnuTLS that guards its port with the gate. The server counts each client's connections,
 * publishes its connection IDs, and accepts the tokens of the gate's Retry packets. It answers "hello" on every
 * bidirectional stream.
 *
 *	cc server.c $(pkg-config --cflags --libs millrace-gate libngtcp2 libngtcp2_crypto_gnutls gnutls)
 *	./a.out eth0 gate.toml web 192.0.2.1 4433 cert.pem key.pem
 *
 * The server goes on if the gate fails after the start. It counts such errors and prints their number at the end. The
 * example is kept short: it has one thread, searches linearly, and leaves out the closing period (RFC 9000, section
 * 10.2).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <gnutls/crypto.h>
#include <gnutls/gnutls.h>
#include <millrace_gate.h>
#include <ngtcp2/ngtcp2.h>
#include <ngtcp2/ngtcp2_crypto.h>
#include <ngtcp2/ngtcp2_crypto_gnutls.h>

#define ID_BYTES    16
#define IDS_MAX	    16 /* limit of connection IDs of a connection at a time; ngtcp2 asks for 8 and replaces some */
#define STREAMS_MAX 64 /* limit of streams of one connection that wait for an answer */
#define PACKET_MAX  1452
#define ALPN	    "hello"

struct connection {
	struct connection *next;
	ngtcp2_crypto_conn_ref ref;
	ngtcp2_conn *quic;
	gnutls_session_t tls;
	ngtcp2_cid original; /* destination ID of the first Initial, chosen by the client; never published */
	ngtcp2_cid ids[IDS_MAX];
	size_t id_count;
	int64_t streams[STREAMS_MAX];
	size_t stream_count;
	size_t sent;			/* bytes of the last stream's answer that were sent so far */
	struct sockaddr_storage client; /* address whose connections the gate counts */
	socklen_t client_len;
	int is_counted;
	int is_over;
};

static struct {
	int socket;
	struct sockaddr_storage address;
	socklen_t address_len;
	gnutls_certificate_credentials_t credentials;
	uint8_t secret[32]; /* key that stateless reset tokens are derived from */
	struct connection *connections;
	millrace_gate *gate;
	millrace_gate_scope *scope;
	unsigned long gate_errors;
} server;

static volatile sig_atomic_t stop;

static void on_signal(int signal)
{
	(void)signal;
	stop = 1;
}

static ngtcp2_tstamp now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * NGTCP2_SECONDS + (uint64_t)time.tv_nsec;
}

/* --- Reports to the gate --- */

/* Counts a failure of a call to the gate, and prints the first one. Returns the call's status. */
static int told(int status)
{
	if (status != MILLRACE_GATE_OK && !server.gate_errors++)
		warnx("gate: %s", millrace_gate_error());
	return status;
}

static void publish(struct connection *c, const ngtcp2_cid *id)
{
	if (c->id_count == IDS_MAX)
		return;
	c->ids[c->id_count++] = *id;
	told(millrace_gate_publish(server.scope, id->data, id->datalen));
}

static void retire(struct connection *c, size_t index)
{
	told(millrace_gate_retire(server.scope, c->ids[index].data, c->ids[index].datalen));
	c->ids[index] = c->ids[--c->id_count];
}

/* --- Callbacks of ngtcp2 --- */

static void random_bytes(uint8_t *to, size_t bytes, const ngtcp2_rand_ctx *context)
{
	(void)context;
	if (gnutls_rnd(GNUTLS_RND_RANDOM, to, bytes))
		abort();
}

static int new_id(ngtcp2_conn *quic, ngtcp2_cid *id, uint8_t *token, size_t bytes, void *user)
{
	struct connection *c = user;

	(void)quic;
	if (c->id_count == IDS_MAX || gnutls_rnd(GNUTLS_RND_RANDOM, id->data, bytes))
		return NGTCP2_ERR_CALLBACK_FAILURE;
	id->datalen = bytes;
	if (ngtcp2_crypto_generate_stateless_reset_token(token, server.secret, sizeof(server.secret), id))
		return NGTCP2_ERR_CALLBACK_FAILURE;
	publish(c, id);
	return 0;
}

static int old_id(ngtcp2_conn *quic, const ngtcp2_cid *id, void *user)
{
	struct connection *c = user;

	(void)quic;
	for (size_t i = 0; i < c->id_count; i++)
		if (ngtcp2_cid_eq(&c->ids[i], id)) {
			retire(c, i);
			break;
		}
	return 0;
}

/* Starts to count the connection. An Initial would be too early, because anybody can send one from a forged address. */
static int handshake_completed(ngtcp2_conn *quic, void *user)
{
	struct connection *c = user;

	(void)quic;
	c->is_counted =
		!told(millrace_gate_inc(server.scope, (struct sockaddr *)&c->client, c->client_len, NULL));
	return 0;
}

static int stream_data(ngtcp2_conn *quic, uint32_t flags, int64_t stream, uint64_t offset, const uint8_t *data,
		       size_t bytes, void *user, void *stream_user)
{
	struct connection *c = user;

	(void)offset, (void)data, (void)stream_user;
	ngtcp2_conn_extend_max_stream_offset(quic, stream, bytes);
	ngtcp2_conn_extend_max_offset(quic, bytes);
	if (flags & NGTCP2_STREAM_DATA_FLAG_FIN && c->stream_count < STREAMS_MAX)
		c->streams[c->stream_count++] = stream;
	return 0;
}

static int stream_over(ngtcp2_conn *quic, uint32_t flags, int64_t stream, uint64_t code, void *user,
		       void *stream_user)
{
	(void)flags, (void)stream, (void)code, (void)user, (void)stream_user;
	ngtcp2_conn_extend_max_streams_bidi(quic, 1);
	return 0;
}

static const ngtcp2_callbacks callbacks = {
	.recv_client_initial = ngtcp2_crypto_recv_client_initial_cb,
	.recv_crypto_data = ngtcp2_crypto_recv_crypto_data_cb,
	.handshake_completed = handshake_completed,
	.encrypt = ngtcp2_crypto_encrypt_cb,
	.decrypt = ngtcp2_crypto_decrypt_cb,
	.hp_mask = ngtcp2_crypto_hp_mask_cb,
	.recv_stream_data = stream_data,
	.stream_close = stream_over,
	.rand = random_bytes,
	.get_new_connection_id = new_id,
	.remove_connection_id = old_id,
	.update_key = ngtcp2_crypto_update_key_cb,
	.delete_crypto_aead_ctx = ngtcp2_crypto_delete_crypto_aead_ctx_cb,
	.delete_crypto_cipher_ctx = ngtcp2_crypto_delete_crypto_cipher_ctx_cb,
	.get_path_challenge_data = ngtcp2_crypto_get_path_challenge_data_cb,
	.version_negotiation = ngtcp2_crypto_version_negotiation_cb,
};

/* --- Connections --- */

static ngtcp2_conn *conn_of(ngtcp2_crypto_conn_ref *ref)
{
	return ((struct connection *)ref->user_data)->quic;
}

static int start_tls(struct connection *c)
{
	const gnutls_datum_t alpn = {(unsigned char *)ALPN, sizeof(ALPN) - 1};

	c->ref = (ngtcp2_crypto_conn_ref){.get_conn = conn_of, .user_data = c};
	if (gnutls_init(&c->tls, GNUTLS_SERVER | GNUTLS_NO_AUTO_SEND_TICKET) ||
	    gnutls_priority_set_direct(c->tls, "NORMAL:-VERS-ALL:+VERS-TLS1.3:%DISABLE_TLS13_COMPAT_MODE", NULL) ||
	    ngtcp2_crypto_gnutls_configure_server_session(c->tls) ||
	    gnutls_credentials_set(c->tls, GNUTLS_CRD_CERTIFICATE, server.credentials) ||
	    gnutls_alpn_set_protocols(c->tls, &alpn, 1, GNUTLS_ALPN_MANDATORY))
		return -1;
	gnutls_session_set_ptr(c->tls, &c->ref);
	return 0;
}

static void forget(struct connection *c)
{
	while (c->id_count)
		retire(c, c->id_count - 1);
	if (c->is_counted)
		told(millrace_gate_dec(server.scope, (struct sockaddr *)&c->client, c->client_len, NULL));
	ngtcp2_conn_del(c->quic);
	if (c->tls)
		gnutls_deinit(c->tls);
	free(c);
}

static void forget_those_that_are_over(void)
{
	struct connection **at = &server.connections;

	while (*at) {
		struct connection *c = *at;

		if (!c->is_over) {
			at = &c->next;
			continue;
		}
		*at = c->next;
		forget(c);
	}
}

/* Sets the transport parameters that authenticate connection IDs (RFC 9000, section 7.3). If the Initial has a token of
 * the gate's Retry, they are the original ID from the token and the Retry's source ID.
 */
static void set_original(ngtcp2_transport_params *params, const ngtcp2_pkt_hd *header, const ngtcp2_path *path)
{
	millrace_gate_id original;
#if NGTCP2_VERSION_NUM >= 0x010000
	const uint8_t *token = header->token;
	size_t token_bytes = header->tokenlen;

	params->original_dcid_present = 1;
#else
	const uint8_t *token = header->token.base;
	size_t token_bytes = header->token.len;
#endif
	params->original_dcid = header->dcid;
	if (!token_bytes || millrace_gate_check_token(server.scope, path->remote.addr, path->remote.addrlen, token,
						      token_bytes, &original))
		return;
	ngtcp2_cid_init(&params->original_dcid, original.bytes, original.len);
	params->retry_scid = header->dcid;
	params->retry_scid_present = 1;
}

static struct connection *accept_connection(const ngtcp2_pkt_hd *header, const ngtcp2_path *path)
{
	struct connection *c = calloc(1, sizeof(*c));
	ngtcp2_settings settings;
	ngtcp2_transport_params params;
	ngtcp2_cid id = {.datalen = ID_BYTES};

	if (!c || gnutls_rnd(GNUTLS_RND_RANDOM, id.data, ID_BYTES)) {
		free(c);
		return NULL;
	}
	memcpy(&c->client, path->remote.addr, path->remote.addrlen);
	c->client_len = path->remote.addrlen;
	c->original = header->dcid;
	ngtcp2_settings_default(&settings);
	settings.initial_ts = now();
	ngtcp2_transport_params_default(&params);
	params.initial_max_streams_bidi = STREAMS_MAX / 2;
	params.initial_max_stream_data_bidi_remote = 64 * 1024;
	params.initial_max_data = 1024 * 1024;
	params.max_idle_timeout = 30 * NGTCP2_SECONDS;
	set_original(&params, header, path);

	publish(c, &id);
	if (ngtcp2_conn_server_new(&c->quic, &header->scid, &id, path, header->version, &callbacks, &settings, &params,
				   NULL, c) ||
	    start_tls(c)) {
		forget(c);
		return NULL;
	}
	ngtcp2_conn_set_tls_native_handle(c->quic, c->tls);
	c->next = server.connections;
	server.connections = c;
	return c;
}

static struct connection *find(const uint8_t *id, size_t bytes)
{
	ngtcp2_cid wanted;

	if (bytes > NGTCP2_MAX_CIDLEN)
		return NULL;
	ngtcp2_cid_init(&wanted, id, bytes);
	for (struct connection *c = server.connections; c; c = c->next) {
		if (ngtcp2_cid_eq(&c->original, &wanted))
			return c;
		for (size_t i = 0; i < c->id_count; i++)
			if (ngtcp2_cid_eq(&c->ids[i], &wanted))
				return c;
	}
	return NULL;
}

/* --- Packets --- */

static void send_all(struct connection *c)
{
	static const uint8_t hello[] = "hello\n";
	const size_t answer_bytes = sizeof(hello) - 1;
	uint8_t packet[PACKET_MAX];
	ngtcp2_path_storage path;
	ngtcp2_pkt_info info;

	ngtcp2_path_storage_zero(&path);
	while (!c->is_over) {
		int64_t stream = c->stream_count ? c->streams[c->stream_count - 1] : -1;
		ngtcp2_vec rest = {(uint8_t *)hello + c->sent, answer_bytes - c->sent};
		ngtcp2_ssize taken = -1;
		ngtcp2_ssize bytes = ngtcp2_conn_writev_stream(
			c->quic, &path.path, &info, packet, sizeof(packet), &taken,
			stream >= 0 ? NGTCP2_WRITE_STREAM_FLAG_FIN : 0, stream, stream >= 0 ? &rest : NULL, stream >= 0,
			now());

		if (taken > 0)
			c->sent += (size_t)taken;
		if (c->sent == answer_bytes || bytes == NGTCP2_ERR_STREAM_NOT_FOUND ||
		    bytes == NGTCP2_ERR_STREAM_SHUT_WR || bytes == NGTCP2_ERR_STREAM_DATA_BLOCKED) {
			c->stream_count--;
			c->sent = 0;
		} else if (bytes < 0) {
			c->is_over = 1;
		}
		if (bytes == 0)
			break;
		if (bytes > 0)
			sendto(server.socket, packet, (size_t)bytes, 0, path.path.remote.addr,
			       path.path.remote.addrlen);
	}
	ngtcp2_conn_update_pkt_tx_time(c->quic, now());
}

static void receive(const uint8_t *packet, size_t bytes, const ngtcp2_path *path)
{
	const ngtcp2_pkt_info info = {0};
	ngtcp2_version_cid ids;
	ngtcp2_pkt_hd header;
	struct connection *c;

	if (ngtcp2_pkt_decode_version_cid(&ids, packet, bytes, ID_BYTES))
		return;
	c = find(ids.dcid, ids.dcidlen);
	if (!c && !ngtcp2_accept(&header, packet, bytes))
		c = accept_connection(&header, path);
	if (!c)
		return;
	if (ngtcp2_conn_read_pkt(c->quic, path, &info, packet, bytes, now()))
		c->is_over = 1; /* the peer closed the connection, or violated the protocol */
	send_all(c);
}

static void receive_all(void)
{
	struct sockaddr_storage from;
	uint8_t packet[65536];

	for (;;) {
		socklen_t from_len = sizeof(from);
		ssize_t bytes =
			recvfrom(server.socket, packet, sizeof(packet), MSG_DONTWAIT, (struct sockaddr *)&from, &from_len);
		const ngtcp2_path path = {
			.local = {(struct sockaddr *)&server.address, server.address_len},
			.remote = {(struct sockaddr *)&from, from_len},
		};

		if (bytes < 0)
			return;
		receive(packet, (size_t)bytes, &path);
	}
}

/* Handles timers that have expired. Returns 1 if no timer is left; otherwise returns 0 and sets the time until the
 * next.
 */
static int handle_timers(struct timespec *wait)
{
	ngtcp2_tstamp next = UINT64_MAX, time = now();

	for (struct connection *c = server.connections; c; c = c->next) {
		if (ngtcp2_conn_get_expiry(c->quic) <= time) {
			if (ngtcp2_conn_handle_expiry(c->quic, time))
				c->is_over = 1; /* the error is usually the idle time-out */
			send_all(c);
		}
		if (!c->is_over && ngtcp2_conn_get_expiry(c->quic) < next)
			next = ngtcp2_conn_get_expiry(c->quic);
	}
	if (next == UINT64_MAX)
		return 1;
	next = next > time ? next - time : 0;
	*wait = (struct timespec){.tv_sec = (time_t)(next / NGTCP2_SECONDS), .tv_nsec = (long)(next % NGTCP2_SECONDS)};
	return 0;
}

/* --- Start and end --- */

static char *read_text(const char *path)
{
	FILE *file = fopen(path, "r");
	char *text = calloc(1, 1 << 16);

	if (!file || !text)
		err(1, "%s", path);
	text[fread(text, 1, (1 << 16) - 1, file)] = 0;
	fclose(file);
	return text;
}

static void open_gate(const char *interface, const char *policy_path, const char *scope)
{
	char *policy = read_text(policy_path);

	if (millrace_gate_open(interface, policy, MILLRACE_GATE_MODE_AUTO, &server.gate) ||
	    millrace_gate_scope_open(server.gate, scope, &server.scope))
		errx(1, "gate: %s", millrace_gate_error());
	free(policy);
}

static void open_socket(const char *address, const char *port)
{
	struct sockaddr_in *v4 = (struct sockaddr_in *)&server.address;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&server.address;
	uint16_t number = htons((uint16_t)atoi(port));

	if (inet_pton(AF_INET, address, &v4->sin_addr) == 1) {
		*v4 = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = number, .sin_addr = v4->sin_addr};
		server.address_len = sizeof(*v4);
	} else if (inet_pton(AF_INET6, address, &v6->sin6_addr) == 1) {
		*v6 = (struct sockaddr_in6){.sin6_family = AF_INET6, .sin6_port = number, .sin6_addr = v6->sin6_addr};
		server.address_len = sizeof(*v6);
	} else {
		errx(1, "%s is no address", address);
	}
	server.socket = socket(server.address.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (server.socket < 0 || bind(server.socket, (struct sockaddr *)&server.address, server.address_len))
		err(1, "%s port %s", address, port);
}

int main(int argc, char **argv)
{
	struct sigaction action = {.sa_handler = on_signal};
	sigset_t ends, none;
	struct pollfd readable;

	if (argc != 8)
		errx(2, "usage: %s INTERFACE POLICY SCOPE ADDRESS PORT CERTIFICATE KEY", argv[0]);
	/* The signals are delivered only during ppoll, so that none arrives between the check of `stop` and the wait.
	 */
	sigemptyset(&none);
	sigemptyset(&ends);
	sigaddset(&ends, SIGINT);
	sigaddset(&ends, SIGTERM);
	sigprocmask(SIG_BLOCK, &ends, NULL);
	sigaction(SIGINT, &action, NULL);
	sigaction(SIGTERM, &action, NULL);
	if (gnutls_certificate_allocate_credentials(&server.credentials) ||
	    gnutls_certificate_set_x509_key_file(server.credentials, argv[6], argv[7], GNUTLS_X509_FMT_PEM) ||
	    gnutls_rnd(GNUTLS_RND_KEY, server.secret, sizeof(server.secret)))
		errx(1, "%s and %s are no certificate and key", argv[6], argv[7]);
	open_socket(argv[4], argv[5]);
	open_gate(argv[1], argv[2], argv[3]);
	puts("ready");
	fflush(stdout);

	readable = (struct pollfd){.fd = server.socket, .events = POLLIN};
	while (!stop) {
		struct timespec wait = {0};
		int forever = handle_timers(&wait);

		forget_those_that_are_over();
		if (ppoll(&readable, 1, forever ? NULL : &wait, &none) < 0 && errno != EINTR)
			err(1, "ppoll");
		receive_all();
		forget_those_that_are_over();
	}

	for (struct connection *c = server.connections; c; c = c->next)
		c->is_over = 1;
	forget_those_that_are_over();
	millrace_gate_scope_close(server.scope);
	millrace_gate_close(server.gate);
	printf("%lu errors of the gate\n", server.gate_errors);
	return 0;
}
