/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* AES-128 and AES-256 encryption of single blocks (FIPS 197) by table look-ups.
 *
 * The time of a look-up depends on the contents of the cache, here as in ghash.h. Code that shares the core's cache
 * might learn about keys from it. Where that matters, use ChaCha20-Poly1305, whose time depends only on lengths.
 */
#ifndef MILLRACE_AES_H
#define MILLRACE_AES_H

#include "bytes.h"
#include "crypto_intf.h"

#define AES_ROUNDS_MAX 14 /* the rounds of AES-256; AES-128 has 10 */

struct aes_block {
	__u8 bytes[16];
};

/* Result of SubBytes and MixColumns for one byte in row 0: {2s, s, s, 3s}, stored twice. The column for a byte in row
 * 1, 2 or 3 is the four bytes at offset 3, 2 or 1. So one table is enough instead of four, without rotations, which BPF
 * lacks.
 */
static const __u64 aes_mix[256] = {
	0xa56363c6a56363c6, 0x847c7cf8847c7cf8, 0x997777ee997777ee, 0x8d7b7bf68d7b7bf6, 0x0df2f2ff0df2f2ff,
	0xbd6b6bd6bd6b6bd6, 0xb16f6fdeb16f6fde, 0x54c5c59154c5c591, 0x5030306050303060, 0x0301010203010102,
	0xa96767cea96767ce, 0x7d2b2b567d2b2b56, 0x19fefee719fefee7, 0x62d7d7b562d7d7b5, 0xe6abab4de6abab4d,
	0x9a7676ec9a7676ec, 0x45caca8f45caca8f, 0x9d82821f9d82821f, 0x40c9c98940c9c989, 0x877d7dfa877d7dfa,
	0x15fafaef15fafaef, 0xeb5959b2eb5959b2, 0xc947478ec947478e, 0x0bf0f0fb0bf0f0fb, 0xecadad41ecadad41,
	0x67d4d4b367d4d4b3, 0xfda2a25ffda2a25f, 0xeaafaf45eaafaf45, 0xbf9c9c23bf9c9c23, 0xf7a4a453f7a4a453,
	0x967272e4967272e4, 0x5bc0c09b5bc0c09b, 0xc2b7b775c2b7b775, 0x1cfdfde11cfdfde1, 0xae93933dae93933d,
	0x6a26264c6a26264c, 0x5a36366c5a36366c, 0x413f3f7e413f3f7e, 0x02f7f7f502f7f7f5, 0x4fcccc834fcccc83,
	0x5c3434685c343468, 0xf4a5a551f4a5a551, 0x34e5e5d134e5e5d1, 0x08f1f1f908f1f1f9, 0x937171e2937171e2,
	0x73d8d8ab73d8d8ab, 0x5331316253313162, 0x3f15152a3f15152a, 0x0c0404080c040408, 0x52c7c79552c7c795,
	0x6523234665232346, 0x5ec3c39d5ec3c39d, 0x2818183028181830, 0xa1969637a1969637, 0x0f05050a0f05050a,
	0xb59a9a2fb59a9a2f, 0x0907070e0907070e, 0x3612122436121224, 0x9b80801b9b80801b, 0x3de2e2df3de2e2df,
	0x26ebebcd26ebebcd, 0x6927274e6927274e, 0xcdb2b27fcdb2b27f, 0x9f7575ea9f7575ea, 0x1b0909121b090912,
	0x9e83831d9e83831d, 0x742c2c58742c2c58, 0x2e1a1a342e1a1a34, 0x2d1b1b362d1b1b36, 0xb26e6edcb26e6edc,
	0xee5a5ab4ee5a5ab4, 0xfba0a05bfba0a05b, 0xf65252a4f65252a4, 0x4d3b3b764d3b3b76, 0x61d6d6b761d6d6b7,
	0xceb3b37dceb3b37d, 0x7b2929527b292952, 0x3ee3e3dd3ee3e3dd, 0x712f2f5e712f2f5e, 0x9784841397848413,
	0xf55353a6f55353a6, 0x68d1d1b968d1d1b9, 0x0000000000000000, 0x2cededc12cededc1, 0x6020204060202040,
	0x1ffcfce31ffcfce3, 0xc8b1b179c8b1b179, 0xed5b5bb6ed5b5bb6, 0xbe6a6ad4be6a6ad4, 0x46cbcb8d46cbcb8d,
	0xd9bebe67d9bebe67, 0x4b3939724b393972, 0xde4a4a94de4a4a94, 0xd44c4c98d44c4c98, 0xe85858b0e85858b0,
	0x4acfcf854acfcf85, 0x6bd0d0bb6bd0d0bb, 0x2aefefc52aefefc5, 0xe5aaaa4fe5aaaa4f, 0x16fbfbed16fbfbed,
	0xc5434386c5434386, 0xd74d4d9ad74d4d9a, 0x5533336655333366, 0x9485851194858511, 0xcf45458acf45458a,
	0x10f9f9e910f9f9e9, 0x0602020406020204, 0x817f7ffe817f7ffe, 0xf05050a0f05050a0, 0x443c3c78443c3c78,
	0xba9f9f25ba9f9f25, 0xe3a8a84be3a8a84b, 0xf35151a2f35151a2, 0xfea3a35dfea3a35d, 0xc0404080c0404080,
	0x8a8f8f058a8f8f05, 0xad92923fad92923f, 0xbc9d9d21bc9d9d21, 0x4838387048383870, 0x04f5f5f104f5f5f1,
	0xdfbcbc63dfbcbc63, 0xc1b6b677c1b6b677, 0x75dadaaf75dadaaf, 0x6321214263212142, 0x3010102030101020,
	0x1affffe51affffe5, 0x0ef3f3fd0ef3f3fd, 0x6dd2d2bf6dd2d2bf, 0x4ccdcd814ccdcd81, 0x140c0c18140c0c18,
	0x3513132635131326, 0x2fececc32fececc3, 0xe15f5fbee15f5fbe, 0xa2979735a2979735, 0xcc444488cc444488,
	0x3917172e3917172e, 0x57c4c49357c4c493, 0xf2a7a755f2a7a755, 0x827e7efc827e7efc, 0x473d3d7a473d3d7a,
	0xac6464c8ac6464c8, 0xe75d5dbae75d5dba, 0x2b1919322b191932, 0x957373e6957373e6, 0xa06060c0a06060c0,
	0x9881811998818119, 0xd14f4f9ed14f4f9e, 0x7fdcdca37fdcdca3, 0x6622224466222244, 0x7e2a2a547e2a2a54,
	0xab90903bab90903b, 0x8388880b8388880b, 0xca46468cca46468c, 0x29eeeec729eeeec7, 0xd3b8b86bd3b8b86b,
	0x3c1414283c141428, 0x79dedea779dedea7, 0xe25e5ebce25e5ebc, 0x1d0b0b161d0b0b16, 0x76dbdbad76dbdbad,
	0x3be0e0db3be0e0db, 0x5632326456323264, 0x4e3a3a744e3a3a74, 0x1e0a0a141e0a0a14, 0xdb494992db494992,
	0x0a06060c0a06060c, 0x6c2424486c242448, 0xe45c5cb8e45c5cb8, 0x5dc2c29f5dc2c29f, 0x6ed3d3bd6ed3d3bd,
	0xefacac43efacac43, 0xa66262c4a66262c4, 0xa8919139a8919139, 0xa4959531a4959531, 0x37e4e4d337e4e4d3,
	0x8b7979f28b7979f2, 0x32e7e7d532e7e7d5, 0x43c8c88b43c8c88b, 0x5937376e5937376e, 0xb76d6ddab76d6dda,
	0x8c8d8d018c8d8d01, 0x64d5d5b164d5d5b1, 0xd24e4e9cd24e4e9c, 0xe0a9a949e0a9a949, 0xb46c6cd8b46c6cd8,
	0xfa5656acfa5656ac, 0x07f4f4f307f4f4f3, 0x25eaeacf25eaeacf, 0xaf6565caaf6565ca, 0x8e7a7af48e7a7af4,
	0xe9aeae47e9aeae47, 0x1808081018080810, 0xd5baba6fd5baba6f, 0x887878f0887878f0, 0x6f25254a6f25254a,
	0x722e2e5c722e2e5c, 0x241c1c38241c1c38, 0xf1a6a657f1a6a657, 0xc7b4b473c7b4b473, 0x51c6c69751c6c697,
	0x23e8e8cb23e8e8cb, 0x7cdddda17cdddda1, 0x9c7474e89c7474e8, 0x211f1f3e211f1f3e, 0xdd4b4b96dd4b4b96,
	0xdcbdbd61dcbdbd61, 0x868b8b0d868b8b0d, 0x858a8a0f858a8a0f, 0x907070e0907070e0, 0x423e3e7c423e3e7c,
	0xc4b5b571c4b5b571, 0xaa6666ccaa6666cc, 0xd8484890d8484890, 0x0503030605030306, 0x01f6f6f701f6f6f7,
	0x120e0e1c120e0e1c, 0xa36161c2a36161c2, 0x5f35356a5f35356a, 0xf95757aef95757ae, 0xd0b9b969d0b9b969,
	0x9186861791868617, 0x58c1c19958c1c199, 0x271d1d3a271d1d3a, 0xb99e9e27b99e9e27, 0x38e1e1d938e1e1d9,
	0x13f8f8eb13f8f8eb, 0xb398982bb398982b, 0x3311112233111122, 0xbb6969d2bb6969d2, 0x70d9d9a970d9d9a9,
	0x898e8e07898e8e07, 0xa7949433a7949433, 0xb69b9b2db69b9b2d, 0x221e1e3c221e1e3c, 0x9287871592878715,
	0x20e9e9c920e9e9c9, 0x49cece8749cece87, 0xff5555aaff5555aa, 0x7828285078282850, 0x7adfdfa57adfdfa5,
	0x8f8c8c038f8c8c03, 0xf8a1a159f8a1a159, 0x8089890980898909, 0x170d0d1a170d0d1a, 0xdabfbf65dabfbf65,
	0x31e6e6d731e6e6d7, 0xc6424284c6424284, 0xb86868d0b86868d0, 0xc3414182c3414182, 0xb0999929b0999929,
	0x772d2d5a772d2d5a, 0x110f0f1e110f0f1e, 0xcbb0b07bcbb0b07b, 0xfc5454a8fc5454a8, 0xd6bbbb6dd6bbbb6d,
	0x3a16162c3a16162c,
};

#define SUBSTITUTED 1 /* offset of the S-box's value in an entry of the table aes_mix */

/* Returns the entry of the table aes_mix for the byte in this row of a column. */
static __always_inline const __u8 *aes_entry(__u32 column, int row)
{
	return (const __u8 *)aes_mix + (row ? column >> (8 * row - 3) & 0x7f8 : (column & 0xff) << 3);
}

/* Computes a column of the next state. ShiftRows takes each of its rows from another column, given here in order. */
static __always_inline __u32 aes_column(__u32 key, __u32 row0, __u32 row1, __u32 row2, __u32 row3)
{
	return key ^ load32(aes_entry(row0, 0)) ^ load32(aes_entry(row1, 1) + 3) ^
	       load32(aes_entry(row2, 2) + 2) ^ load32(aes_entry(row3, 3) + 1);
}

/* Computes a column of the last round, which has no MixColumns. */
static __always_inline __u32 aes_last_column(__u32 key, __u32 row0, __u32 row1, __u32 row2, __u32 row3)
{
	return key ^ aes_entry(row0, 0)[SUBSTITUTED] ^ aes_entry(row1, 1)[SUBSTITUTED] << 8 ^
	       aes_entry(row2, 2)[SUBSTITUTED] << 16 ^ (__u32)aes_entry(row3, 3)[SUBSTITUTED] << 24;
}

/* Encrypts a block. The function is global in BPF, so that the verifier checks it once instead of once per block. */
__noinline int aes_block(const struct aes_key *key, const struct aes_block *in, struct aes_block *out)
{
	if (!key || !in || !out)
		return -1;

	const __u32 *k = key->words, rounds = key->rounds;
	/* Each variable is a column of the state, with row 0 in the low bits. */
	__u32 a = load32(in->bytes) ^ k[0], b = load32(in->bytes + 4) ^ k[1];
	__u32 c = load32(in->bytes + 8) ^ k[2], d = load32(in->bytes + 12) ^ k[3];

	for (__u32 round = 1; round < AES_ROUNDS_MAX; round++) {
		if (round >= rounds)
			break;
		k += 4;
		__u32 a1 = aes_column(k[0], a, b, c, d), b1 = aes_column(k[1], b, c, d, a);
		__u32 c1 = aes_column(k[2], c, d, a, b), d1 = aes_column(k[3], d, a, b, c);

		a = a1, b = b1, c = c1, d = d1;
	}
	k += 4;
	store32(out->bytes, aes_last_column(k[0], a, b, c, d));
	store32(out->bytes + 4, aes_last_column(k[1], b, c, d, a));
	store32(out->bytes + 8, aes_last_column(k[2], c, d, a, b));
	store32(out->bytes + 12, aes_last_column(k[3], d, a, b, c));
	return 0;
}

#undef SUBSTITUTED
#undef AES_ROUNDS_MAX

#endif
