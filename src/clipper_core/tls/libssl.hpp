// The functions of OpenSSL that TLS takes, looked up in the library of the interpreter, and one
// TLS connection over them, without a descriptor: bytes in, bytes out.
//
// No header of OpenSSL is needed: its functions of 1.1.1 and 3 that are named here have the same
// arguments on Linux, where long has 64 bits. Macros of its headers are numbers here.
//
// Threads: load() once, with the GIL, before everything else. A session is one thread's; a context
// is shared once it is complete, since OpenSSL counts its users.
#pragma once

#include <dlfcn.h>
#include <cstring>
#include "runtime/byte_buffer.hpp"

namespace clipper {

// Result, name, arguments.
#define CLIPPER_LIBSSL_FUNCTIONS(F)                                                             \
    F(const char*, OpenSSL_version, (int))                                                      \
    F(unsigned long, OpenSSL_version_num, ())                                                   \
    F(void, ERR_clear_error, ())                                                                \
    F(unsigned long, ERR_peek_last_error, ())                                                   \
    F(const char*, ERR_reason_error_string, (unsigned long))                                    \
    F(int, BIO_get_new_index, ())                                                               \
    F(void*, BIO_meth_new, (int, const char*))                                                  \
    F(int, BIO_meth_set_read, (void*, int (*)(void*, char*, int)))                              \
    F(int, BIO_meth_set_write, (void*, int (*)(void*, const char*, int)))                       \
    F(int, BIO_meth_set_ctrl, (void*, long (*)(void*, int, long, void*)))                       \
    F(void*, BIO_new, (const void*))                                                            \
    F(void*, BIO_new_mem_buf, (const void*, int))                                               \
    F(int, BIO_free, (void*))                                                                   \
    F(void, BIO_set_data, (void*, void*))                                                       \
    F(void*, BIO_get_data, (void*))                                                             \
    F(void, BIO_set_init, (void*, int))                                                         \
    F(void, BIO_set_flags, (void*, int))                                                        \
    F(void, BIO_clear_flags, (void*, int))                                                      \
    F(void*, PEM_read_bio_X509, (void*, void**, int (*)(char*, int, int, void*), void*))        \
    F(void*, PEM_read_bio_X509_AUX, (void*, void**, int (*)(char*, int, int, void*), void*))    \
    F(void*, PEM_read_bio_PrivateKey, (void*, void**, int (*)(char*, int, int, void*), void*))  \
    F(void, X509_free, (void*))                                                                 \
    F(void, EVP_PKEY_free, (void*))                                                             \
    F(int, X509_STORE_add_cert, (void*, void*))                                                 \
    F(const void*, TLS_server_method, ())                                                       \
    F(void*, SSL_CTX_new, (const void*))                                                        \
    F(void, SSL_CTX_free, (void*))                                                              \
    F(int, SSL_CTX_up_ref, (void*))                                                             \
    F(long, SSL_CTX_ctrl, (void*, int, long, void*))                                            \
    F(unsigned long, SSL_CTX_set_options, (void*, unsigned long))                               \
    F(int, SSL_CTX_set_cipher_list, (void*, const char*))                                       \
    F(void, SSL_CTX_set_security_level, (void*, int))                                           \
    F(int, SSL_CTX_set_num_tickets, (void*, size_t))                                            \
    F(int, SSL_CTX_set_session_id_context, (void*, const unsigned char*, unsigned))             \
    F(void, SSL_CTX_set_verify, (void*, int, void*))                                            \
    F(void, SSL_CTX_set_alpn_select_cb,                                                         \
      (void*, int (*)(void*, const unsigned char**, unsigned char*, const unsigned char*,       \
                      unsigned, void*), void*))                                                 \
    F(int, SSL_CTX_use_certificate, (void*, void*))                                             \
    F(int, SSL_CTX_use_PrivateKey, (void*, void*))                                              \
    F(int, SSL_CTX_check_private_key, (const void*))                                            \
    F(void*, SSL_CTX_get_cert_store, (const void*))                                             \
    F(void*, SSL_new, (void*))                                                                  \
    F(void, SSL_free, (void*))                                                                  \
    F(void, SSL_set_bio, (void*, void*, void*))                                                 \
    F(void, SSL_set_accept_state, (void*))                                                      \
    F(int, SSL_do_handshake, (void*))                                                           \
    F(int, SSL_read, (void*, void*, int))                                                       \
    F(int, SSL_write, (void*, const void*, int))                                                \
    F(int, SSL_get_error, (const void*, int))                                                   \
    F(int, SSL_shutdown, (void*))

struct Libssl {
#define CLIPPER_DECLARE(result, name, arguments) result(*name) arguments = nullptr;
    CLIPPER_LIBSSL_FUNCTIONS(CLIPPER_DECLARE)
#undef CLIPPER_DECLARE
    void* method = nullptr;  // BIO_METHOD of sessions
    const char* missing = "";

    // Look up all functions in the library at `path`, and in those that it needs; nullptr: in the
    // program. If they are not all there, return false and name what is `missing`; nothing else has
    // changed then.
    bool load(const char* path);
};

// A complete SSL_CTX, and the library that it is of.
struct TlsContextState {
    const Libssl* lib = nullptr;
    void* ctx = nullptr;

    TlsContextState() = default;
    TlsContextState(const TlsContextState&) = delete;
    TlsContextState& operator=(const TlsContextState&) = delete;
    ~TlsContextState() { drop(); }
    bool is_set() const { return ctx != nullptr; }
    void share(const TlsContextState& other) {  // replace it by the context of another
        if (other.ctx != nullptr) other.lib->SSL_CTX_up_ref(other.ctx);
        drop();
        lib = other.lib, ctx = other.ctx;
    }
    void drop() {
        if (ctx != nullptr) lib->SSL_CTX_free(ctx);
        ctx = nullptr;
    }
};

enum TlsOutcome : int { kTlsFailed = -1, kTlsWants = 0, kTlsDone = 1 };

// The server's side of one connection.
struct TlsSession {
    enum : int {
        kWantRead = 2, kRetryRead = 9, kRetryFlags = 15, kControlPending = 10, kControlFlush = 11
    };
    const Libssl* lib = nullptr;
    void* ssl = nullptr;
    const std::uint8_t* given = nullptr;  // bytes of the peer that OpenSSL has not read
    std::uint64_t given_bytes = 0;
    Bytes out;  // to be sent to the peer
    bool has_ended = false;  // the peer has said that it sends no more

    TlsSession() = default;
    TlsSession(const TlsSession&) = delete;
    TlsSession& operator=(const TlsSession&) = delete;
    ~TlsSession() {
        if (ssl != nullptr) lib->SSL_free(ssl);
    }

    bool open(const TlsContextState& context) {  // false: no memory
        lib = context.lib;
        void* bio = lib->BIO_new(lib->method);
        ssl = bio == nullptr ? nullptr : lib->SSL_new(context.ctx);
        if (ssl == nullptr) {
            if (bio != nullptr) lib->BIO_free(bio);
            lib->ERR_clear_error();
            return false;
        }
        lib->BIO_set_data(bio, this);
        lib->BIO_set_init(bio, 1);
        lib->SSL_set_bio(ssl, bio, bio);
        lib->SSL_set_accept_state(ssl);
        return true;
    }
    // Take bytes of the peer. They stay where they are until shake() or read() has used them.
    void give(const std::uint8_t* from, std::uint64_t n) { given = from, given_bytes = n; }
    TlsOutcome shake() { return outcome(lib->SSL_do_handshake(ssl)); }
    // Decrypt into `to`. Return how many bytes; less than `room` once all that was given is used.
    // -1: the peer breaks the protocol, or there is no memory.
    std::int64_t read(std::uint8_t* to, std::uint64_t room) {
        std::uint64_t n = 0;
        while (n < room && !has_ended) {
            int piece = lib->SSL_read(ssl, to + n, int(room - n));
            if (piece > 0) {
                n += std::uint64_t(piece);
                if (given_bytes == 0) break;  // a record ended with the last of the bytes
                continue;
            }
            int why = lib->SSL_get_error(ssl, piece);
            lib->ERR_clear_error();
            if (why == kWantRead) break;
            if (why != 6) return -1;
            has_ended = true;
        }
        return std::int64_t(n);
    }
    bool write(const std::uint8_t* from, std::uint64_t n) {  // encrypt into `out`
        while (n) {
            int piece = lib->SSL_write(ssl, from, n < 16384 ? int(n) : 16384);
            if (piece <= 0 || out.lost) {
                lib->ERR_clear_error();
                return false;
            }
            from += piece, n -= std::uint64_t(piece);
        }
        return true;
    }
    void say_end() {  // that nothing more is sent
        lib->SSL_shutdown(ssl);
        lib->ERR_clear_error();
    }

  private:
    TlsOutcome outcome(int done) {
        if (done == 1) return out.lost ? kTlsFailed : kTlsDone;
        int why = lib->SSL_get_error(ssl, done);
        lib->ERR_clear_error();
        return why == kWantRead && !out.lost ? kTlsWants : kTlsFailed;
    }
};
// -- what OpenSSL calls, and the look-up. Only in the module that calls load().

inline const Libssl*& tls_bio_library() {
    static const Libssl* lib = nullptr;
    return lib;
}

inline int tls_bio_read(void* bio, char* to, int n) {
    auto* session = static_cast<TlsSession*>(tls_bio_library()->BIO_get_data(bio));
    session->lib->BIO_clear_flags(bio, TlsSession::kRetryFlags);
    if (session->given_bytes == 0) {
        session->lib->BIO_set_flags(bio, TlsSession::kRetryRead);
        return -1;
    }
    std::uint64_t taken = std::uint64_t(n) < session->given_bytes ? std::uint64_t(n)
                                                                  : session->given_bytes;
    std::memcpy(to, session->given, taken);
    session->given += taken;
    session->given_bytes -= taken;
    return int(taken);
}

inline int tls_bio_write(void* bio, const char* from, int n) {
    auto* session = static_cast<TlsSession*>(tls_bio_library()->BIO_get_data(bio));
    session->lib->BIO_clear_flags(bio, TlsSession::kRetryFlags);
    session->out.put(from, std::uint64_t(n));
    return session->out.lost ? -1 : n;
}

inline long tls_bio_control(void* bio, int command, long, void*) {
    if (command == TlsSession::kControlFlush) return 1;
    if (command != TlsSession::kControlPending) return 0;
    return long(static_cast<TlsSession*>(tls_bio_library()->BIO_get_data(bio))->given_bytes);
}

// `h2` before `http/1.1`; neither: the handshake goes on without a protocol.
inline int tls_choose_protocol(void*, const unsigned char** chosen, unsigned char* bytes,
                               const unsigned char* offered, unsigned offered_bytes, void*) {
    static const char* const known[] = {"h2", "http/1.1"};
    for (const char* name : known) {
        for (unsigned at = 0; at < offered_bytes; at += 1u + offered[at]) {
            unsigned n = offered[at];
            if (n != std::strlen(name) || at + 1 + n > offered_bytes) continue;
            if (std::memcmp(offered + at + 1, name, n)) continue;
            *chosen = offered + at + 1;
            *bytes = static_cast<unsigned char>(n);
            return 0;
        }
    }
    return 3;
}

inline void tls_set_protocols(const Libssl* lib, void* ctx) {
    lib->SSL_CTX_set_alpn_select_cb(ctx, tls_choose_protocol, nullptr);
}

// A private key with a password is an error, not a question at the terminal.
inline int tls_no_password(char*, int, int, void*) { return -1; }

inline bool Libssl::load(const char* path) {
    Libssl found;  // what is in use stays if anything is missing
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    missing = "OpenSSL";
    if (library == nullptr) return false;
    bool all = true;
#define CLIPPER_LOOK_UP(result, name, arguments)                                  \
    found.name = reinterpret_cast<result(*) arguments>(dlsym(library, #name)); \
    if (all && found.name == nullptr) missing = #name, all = false;
    CLIPPER_LIBSSL_FUNCTIONS(CLIPPER_LOOK_UP)
#undef CLIPPER_LOOK_UP
    if (!all) return false;
    missing = "OpenSSL 1.1.1 or newer";
    if (std::strncmp(found.OpenSSL_version(0), "OpenSSL ", 8) ||
        found.OpenSSL_version_num() < 0x10101000ul)
        return false;
    missing = "memory";
    found.method = found.BIO_meth_new(found.BIO_get_new_index() | 0x0400, "clipper");
    if (found.method == nullptr) return false;
    found.BIO_meth_set_read(found.method, tls_bio_read);
    found.BIO_meth_set_write(found.method, tls_bio_write);
    found.BIO_meth_set_ctrl(found.method, tls_bio_control);
    *this = found;
    tls_bio_library() = this;
    return true;
}

}  // namespace clipper
