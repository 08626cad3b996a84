/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Bits of the first byte of QUIC packets (RFC 8999, section 5; RFC 9000, section 17), and the supported versions. */
#ifndef MILLRACE_QUIC_H
#define MILLRACE_QUIC_H

#define QUIC_LONG_HEADER 0x80 /* header form: set in long headers, clear in short ones */
#define QUIC_FIXED_BIT	 0x40 /* fixed bit: set, unless the receiver allows it to be clear (RFC 9287) */

#define QUIC_VERSION_1 0x00000001
#define QUIC_VERSION_2 0x6b3343cf

#endif
