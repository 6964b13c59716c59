"""Live upgrade: a running server passes everything on to a new process while its clients wait for an instant.

The new process asks at the socket. What takes long happens while the old one serves: it closes its tiers (of which
nothing is found for that time), and the new one maps the pools, takes in most of their chunks and opens the tiers. Then
the old one stops between two requests, sends what has changed with its clients' connections, and waits. The new one
answers with a byte, which the kernel delivers or refuses as a whole: if it is delivered, the old process has ended, and
otherwise it goes on. So whichever process dies, and whenever, exactly one goes on serving.
"""
