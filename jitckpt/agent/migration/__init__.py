"""Worker processes are dumped by CRIU and made again."""
