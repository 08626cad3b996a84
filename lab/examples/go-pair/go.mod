module millrace/go-pair

go 1.19
