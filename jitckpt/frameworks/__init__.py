"""Training frameworks whose unchanged programs are protected: one file each, behind the contract of protection.py."""
